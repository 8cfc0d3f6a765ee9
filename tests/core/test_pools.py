"""Device types for policies that know of none: who goes where, and that nobody loses by it what it need not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policy_checks import answer, need_of, why
from strategies import job, nodes_of, snapshots, view_of
from stretto.core import pools, reasons
from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, IntArray, Snapshot


def typed(gpus: Sequence[int], jobs: list[dict[str, object]], where: Sequence[int], slow: float = 1.0) -> Snapshot:
    """Jobs on a cluster with so many GPUs of each type; the later types run at `slow` times the speed."""
    view = view_of(sum(gpus), jobs)
    speed = np.array([1.0, *[slow] * (len(gpus) - 1)])[:, None, None]
    return msgspec.structs.replace(
        view,
        pools=tuple(f"type-{i}" for i in range(len(gpus))),
        nodes=nodes_of(gpus, list(range(len(gpus)))),
        capacity=np.array(gpus) * GPU,
        pool=np.array(where),
        rates=view.rates * speed,
    )


def assigned(view: Snapshot, workers: Sequence[int]) -> tuple[list[int], list[int]]:
    """Workers and pools, -1 where there are none."""
    decision = Decision.of(view, np.array(workers), np.full(len(view), int(Reason.RUNS)))
    found = pools.assign(view, decision, view.min_workers)
    return found.workers.tolist(), np.where(found.workers > 0, found.pool, -1).tolist()


def test_everybody_keeps_its_pool() -> None:
    view = typed([4, 4], [job(size=2, workers=2)] * 3, [1, 1, 0])
    assert assigned(view, [2, 2, 2]) == ([2, 2, 2], [1, 1, 0])


def test_newcomers_take_the_roomiest_widest_first() -> None:
    view = typed([4, 6], [job(size=1), job(size=4), job(size=5)], [-1, -1, -1])
    assert assigned(view, [1, 4, 5]) == ([1, 4, 5], [1, 0, 1])


def test_who_fits_nowhere_waits() -> None:
    view = typed([4, 4], [job(size=3, workers=3), job(size=3, workers=3), job(size=2)], [0, 1, -1])
    decision = Decision.of(view, np.array([3, 3, 2]), np.full(3, int(Reason.RUNS)))
    found = pools.assign(view, decision, view.min_workers)
    assert found.workers.tolist() == [3, 3, 0]
    assert found.reason.tolist() == [Reason.RUNS, Reason.RUNS, Reason.FRAGMENTED]
    assert found.detail[2].tolist() == [2, 1]


def test_who_gets_less_than_decided_is_told_so() -> None:
    jobs = [job(max_workers=8, workers=2), job(max_workers=8, workers=2), job(size=3)]
    view = typed([6, 4], jobs, [0, 1, -1])
    decision = Decision.of(view, np.array([5, 5, 0]), np.array([Reason.GROWN, Reason.AT_MAXIMUM, Reason.NO_ROOM]), 1, 2)
    found = pools.assign(view, decision, view.min_workers)
    assert found.workers.tolist() == [5, 4, 0]
    assert found.reason.tolist() == [Reason.GROWN, Reason.CUT_TO_ROOM, Reason.NO_ROOM]
    assert found.detail.tolist() == [[1, 2], [4, 5], [1, 2]]
    told = reasons.explain(int(found.reason[1]), *found.detail[1])
    assert told == "runs on 4 workers: there was no place for the 5 that were decided"


def test_all_or_nothing_under_a_rigid_policy() -> None:
    """Six GPUs are free in all, so both policies would start the job at its size, but there are three of each type."""
    jobs = [job(size=1, workers=1), job(size=1, workers=1), job(requested=4, min_workers=1, max_workers=4)]
    view = typed([4, 4], jobs, [0, 1, -1])
    rigid, elastic = answer("fifo", view), answer("elastic-fifo", view)
    assert rigid.workers.tolist() == [1, 1, 0]
    assert (why(rigid, 2), rigid.detail[2].tolist()) == (Reason.FRAGMENTED, [4, 3])
    assert elastic.workers.tolist() == [1, 1, 3]
    assert (why(elastic, 2), elastic.detail[2].tolist()) == (Reason.CUT_TO_ROOM, [3, 4])


def test_nobody_stops_because_another_one_grows() -> None:
    """Together there is one GPU free, but of the other type: the first job cannot have it."""
    jobs = [job(min_workers=2, max_workers=4, workers=2), job(size=2, workers=2), job(size=3, workers=3)]
    assert assigned(typed([4, 4], jobs, [0, 0, 1]), [3, 2, 3]) == ([2, 2, 3], [0, 0, 1])


def test_a_job_moves_to_where_there_is_room_to_grow() -> None:
    view = typed([2, 8], [job(max_workers=8, workers=2)], [0])
    assert assigned(view, [8]) == ([8], [1])
    view = typed([2, 6], [job(max_workers=8, workers=2)], [0])
    assert assigned(view, [8]) == ([6], [1]), "as much as there is"
    view = typed([4, 4], [job(max_workers=8, workers=4)], [1])
    assert assigned(view, [8]) == ([4], [1]), "not for nothing"


def test_nobody_is_sent_where_it_makes_no_progress() -> None:
    view = typed([2, 8], [job(max_workers=8)], [-1], slow=0.0)
    assert assigned(view, [8]) == ([2], [0])


def test_jobs_without_gpus() -> None:
    view = typed([1, 0], [job(size=1, workers=1), job(size=3, width=0)], [0, -1])
    assert assigned(view, [1, 3])[0] == [1, 3]


def test_one_large_pool() -> None:
    view = typed([4, 2, 1], [job(size=1, workers=1), job(size=2)], [2, -1])
    whole = pools.merged(view)
    assert whole.total_milli == view.total_milli
    assert (whole.pools, whole.capacity.tolist(), whole.pool.tolist()) == (("type-0",), [7 * GPU], [0, -1])
    assert set(whole.nodes.pool.tolist()) == {0}


@st.composite
def wished(draw: st.DrawFn) -> tuple[Snapshot, IntArray]:
    """Workers that fit the cluster as a whole."""
    view = draw(snapshots(pools=3, overfull=False))
    workers, free = np.zeros(len(view), np.int64), view.total_milli
    for j in range(len(view)):
        size = draw(st.integers(int(view.min_workers[j]), int(view.max_workers[j])))
        need = int(size * view.width[j] + view.fixed_milli[j])
        if need <= free:
            workers[j], free = size, free - need
    return view, workers


@given(case=wished())
def test_what_holds_for_all(case: tuple[Snapshot, IntArray]) -> None:
    """No pool is overcommitted; nobody gets more than decided or less than its minimum, and who waits had no room."""
    view, workers = case
    found = pools.assign(view, Decision.of(view, workers, np.full(len(view), int(Reason.RUNS))), view.min_workers)
    assert ((found.reason == Reason.RUNS) == (found.workers == workers)).all()
    runs = found.workers > 0
    held = need_of(view, found.workers)
    used = np.bincount(found.pool[runs], held[runs], len(view.pools))
    assert (used <= view.capacity).all()
    assert (found.workers <= workers).all()
    assert (found.workers[runs] >= view.min_workers[runs]).all()
    # Everybody who runs now fits where it is, with its minimum: only those who come in from outside may miss out.
    assert runs[(view.workers > 0) & (workers > 0)].all()


@given(case=wished())
def test_rigid_jobs_get_all_or_nothing(case: tuple[Snapshot, IntArray]) -> None:
    view, workers = case
    found = pools.assign(view, Decision.of(view, workers, np.full(len(view), int(Reason.RUNS))), workers)
    assert ((found.workers == workers) | (found.workers == 0)).all()
    used = np.bincount(found.pool, need_of(view, found.workers), len(view.pools))
    assert (used <= view.capacity).all()
