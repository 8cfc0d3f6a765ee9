"""The decision cycle: progress is kept, room is kept for who waits long, cores are shared, sizes make jobs faster."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placement_cases import make
from strategies import fragile, job, snapshots, view_of
from stretto.core import cycle, services
from stretto.core.cycle import CycleState, Outcome, Settings
from stretto.core.policies import BUILTIN
from stretto.core.policy import load
from stretto.core.reasons import Reason, explain
from stretto.core.reservations import Wait
from stretto.core.snapshot import GPU, IntArray, Snapshot

CHEAP: dict[str, dict[str, Any]] = {"pollux": {"population": 8, "generations": 4}}


def decide(view: Snapshot, policy: str = "srtf", state: CycleState | None = None, **chosen: Any) -> Outcome:
    return cycle.decide(view, load(policy, CHEAP.get(policy, {})), state or CycleState(), Settings(**chosen))


def with_nodes(devices: list[int], jobs: list[dict[str, Any]], placed: list[list[int]], **nodes: Any) -> Snapshot:
    view = make(devices, jobs, placed, **nodes).view
    return msgspec.structs.replace(view, pool=np.where(view.workers > 0, 0, -1))


def told(outcome: Outcome, j: int) -> str:
    *named, more = outcome.about[j].tolist()
    about = [f"job {number}" for number in named if number >= 0]
    return explain(int(outcome.reason[j]), *outcome.detail[j].tolist(), about, more)


# Progress is kept.


def test_a_job_that_would_lose_its_work_is_not_stopped_for_an_equal() -> None:
    long = fragile(size=1, workers=1, remaining=1000.0, ran_s=8.0, start_s=0.5)
    view = view_of(2, [long, long, job(size=1, remaining=1.0), job(size=1, remaining=1.0)])
    free = decide(view, stops_lose_work=True)
    assert free.workers.tolist() == [0, 0, 1, 1]
    kept = decide(view)
    assert kept.workers.tolist() == [1, 1, 0, 0]
    assert kept.reason.tolist() == [Reason.KEEPS_PROGRESS] * 2 + [Reason.WAITS_FOR_PINNED] * 2
    assert told(kept, 0) == "goes on as it is: stopping it would lose 8 s of work"
    assert "held by jobs that would lose their work (job 0, job 1)" in told(kept, 2)


def test_little_work_is_weighed_like_a_start() -> None:
    young = fragile(size=1, workers=1, remaining=1000.0, ran_s=0.9, start_s=0.5)
    assert decide(view_of(1, [young, job(size=1, remaining=1.0)])).workers.tolist() == [0, 1]


def test_what_the_policy_remembers_is_what_it_said_of_everybody() -> None:
    view = view_of(1, [fragile(size=1, workers=1, remaining=1000.0, ran_s=9.0), job(size=1, remaining=1.0)])
    remembered, said = decide(view, "round-robin").state.policy, load("round-robin").decide(view, None).memory
    assert repr(remembered) == repr(said)


def test_a_resize_that_would_restart_a_job_is_not_made_either() -> None:
    grows = fragile(min_workers=1, max_workers=4, workers=1, remaining=1000.0, ran_s=100.0)
    assert decide(view_of(4, [grows]), "elastic-fifo").workers.tolist() == [1]


def test_nobody_is_moved_who_would_lose_its_work() -> None:
    """Two narrow jobs on two nodes; a wide one would fit if one of them moved."""
    narrow = fragile(size=1, workers=1, remaining=1e6, ran_s=50.0)
    wide = job(size=1, width=2 * GPU, remaining=1.0)
    view = with_nodes([2, 2], [narrow, narrow, wide], [[1, 0], [0, 1], [0, 0]])
    freely = decide(view, "fit-first", placement="fewest-moves", stops_lose_work=True)
    assert freely.workers.tolist() == [1, 1, 1]
    kept = decide(view, "fit-first", placement="fewest-moves")
    assert kept.placed.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert kept.reason[2] == Reason.FRAGMENTED


def test_the_urgent_stop_only_what_is_preemptible_and_only_as_much_as_they_need() -> None:
    columns: dict[str, Any] = {"size": 1, "workers": 1, "remaining": 1e6, "priority": 50}
    jobs = [
        fragile(**columns, ran_s=100.0, preemptible=True),
        fragile(**columns, ran_s=10.0, preemptible=True),
        fragile(**columns, ran_s=5.0),
        job(size=1, remaining=10.0, priority=60),
    ]
    outcome = decide(view_of(3, jobs), "priority")
    assert outcome.workers.tolist() == [1, 0, 1, 1]
    assert outcome.reason[1] == Reason.PREEMPTED_URGENT
    assert told(outcome, 1) == "stopped for a more urgent job (job 3): 10 s of its work are lost"
    nobody = [msgspec.structs.replace(view_of(3, jobs), preemptible=np.zeros(4, np.bool_))][0]
    waits = decide(nobody, "priority")
    assert waits.workers.tolist() == [1, 1, 1, 0]
    assert waits.reason[3] == Reason.WAITS_FOR_PINNED


def test_nobody_is_stopped_for_an_urgent_job_that_would_not_start_all_the_same() -> None:
    columns: dict[str, Any] = {"workers": 1, "remaining": 1e6, "ran_s": 100.0}
    jobs = [fragile(size=1, **columns, preemptible=True), fragile(size=1, **columns), job(size=2, priority=9)]
    assert decide(view_of(2, jobs), "priority").workers.tolist() == [1, 1, 0]


def test_nobody_loses_work_because_a_policy_prefers_an_equal_to_the_urgent() -> None:
    """The urgent one runs and keeps its progress; the policy gives its worker to a short job, and not for want of room
    that others hold."""
    columns: dict[str, Any] = {"size": 1, "workers": 1, "remaining": 1e4, "ran_s": 100.0, "preemptible": True}
    kind: dict[str, Any] = {"min_workers": 1, "max_workers": 2, "lost_s": 0.0, "fragile": False, "preemptible": True}
    urgent = job(**kind, workers=1, remaining=500.0, priority=9)
    jobs = [fragile(**columns), fragile(**columns), urgent, job(**kind, remaining=5.0)]
    assert decide(view_of(3, jobs), "elastic-srtf").workers.tolist() == [1, 1, 0, 1]
    jobs[3] = job(**kind, remaining=5.0, priority=9)
    assert decide(view_of(3, jobs), "elastic-srtf").workers.tolist() in ([0, 1, 1, 1], [1, 0, 1, 1])


def test_services_take_room_of_preemptible_jobs_only() -> None:
    service = job(min_workers=1, max_workers=3, is_service=True, wanted=3, priority=80)
    columns: dict[str, Any] = {"size": 1, "workers": 1, "remaining": 1e6, "ran_s": 100.0, "priority": 50}
    outcome = decide(view_of(3, [service, fragile(**columns, preemptible=True), fragile(**columns)]), "fifo")
    assert outcome.workers.tolist() == [2, 0, 1]


def test_an_elastic_job_that_is_not_preemptible_keeps_its_minimum() -> None:
    elastic = job(min_workers=2, max_workers=4, workers=4, remaining=1e6, lost_s=0.0, fragile=False)
    urgent = job(size=4, remaining=1.0, priority=9, lost_s=0.0, fragile=False, preemptible=True)
    outcome = decide(view_of(4, [elastic, urgent]), "stretto")
    assert outcome.workers.tolist()[0] >= 2
    assert outcome.workers.tolist()[1] == 0


ELASTIC: dict[str, Any] = {"lost_s": 0.0, "fragile": False}
"""Columns of a job that keeps its progress and is not preemptible."""


@pytest.mark.parametrize("policy", ["srtf", "elastic-srtf", "afs-l", "stretto"])
def test_such_a_job_is_not_stopped_beside_pinned_ones_either(policy: str) -> None:
    """The policy would stop the pinned job; without it in question it is the other one's turn."""
    long = fragile(size=1, workers=1, remaining=1e6, ran_s=100.0)
    elastic = job(min_workers=1, max_workers=2, workers=1, remaining=1e4, **ELASTIC)
    outcome = decide(view_of(2, [long, elastic, job(size=1, remaining=1.0, **ELASTIC)]), policy)
    assert outcome.workers.tolist() == [1, 1, 0]
    assert "job 1" not in told(outcome, 2)


def test_who_keeps_its_minimum_is_told_so() -> None:
    elastic = job(min_workers=1, max_workers=3, workers=3, remaining=1e6, **ELASTIC)
    jobs = [elastic, job(size=2, remaining=1.0, **ELASTIC), job(size=1, remaining=2.0, **ELASTIC)]
    outcome = decide(view_of(3, jobs), "elastic-srtf")
    assert outcome.workers.tolist() == [1, 2, 0]
    assert told(outcome, 0) == "runs on its minimum of 1 worker: it is not preemptible"
    assert "would lose their work" not in told(outcome, 2)


def test_a_reservation_takes_no_minimum_from_such_a_job() -> None:
    """There is room for the late job beside the pinned one, but for somebody who is not preemptible."""
    elastic = job(size=2, workers=2, remaining=10.0, **ELASTIC)
    jobs = [elastic, fragile(size=2, remaining=100.0), fragile(size=2, workers=2, remaining=1e6, ran_s=100.0)]
    state = CycleState(blocked={1: Wait(10.0)})
    assert decide(view_of(4, jobs, now_s=100.0), "srtf", state).workers.tolist() == [2, 0, 2]


@pytest.mark.parametrize(("policy", "options"), [("edf", {"admission": True}), ("elasticflow", {})])
def test_pinned_jobs_do_not_make_a_policy_reject_whom_it_admits(policy: str, options: dict[str, Any]) -> None:
    """They end in time, but the second question cannot say so."""
    late = fragile(size=2, workers=2, remaining=10.0, ran_s=50.0, deadline_s=1e5)
    never = fragile(size=1, remaining=1e3, deadline_s=100.0)
    view = view_of(2, [late, fragile(size=1, remaining=10.0, deadline_s=100.0), never])
    outcome = cycle.decide(view, load(policy, options), CycleState(), Settings())
    assert outcome.workers.tolist() == [2, 0, 0]
    assert outcome.rejected.tolist() == [False, False, True]
    assert outcome.reason[1:].tolist() == [Reason.WAITS_FOR_PINNED, Reason.REJECTED_DEADLINE]


# Work is lost to urgent jobs only where that serves them.


def narrow(ran_s: float, **columns: Any) -> dict[str, Any]:
    """A job that an urgent one may stop."""
    return fragile(size=1, workers=1, remaining=1e6, ran_s=ran_s, preemptible=True, **columns)


@pytest.mark.parametrize("policy", ["priority", "stretto", "srtf"])
def test_an_urgent_job_gets_a_node_of_which_all_may_be_stopped(policy: str) -> None:
    jobs = [fragile(size=1, workers=1, remaining=1e6, ran_s=50.0), *map(narrow, (10.0, 20.0, 30.0, 40.0))]
    jobs.append(job(size=1, width=4 * GPU, remaining=1.0, priority=9, **ELASTIC))
    placed = [[1, 0], *[[0, 1]] * 4, [0, 0]]
    outcome = decide(with_nodes([4, 4], jobs, placed), policy, placement="fewest-moves")
    assert outcome.workers.tolist() == [1, 0, 0, 0, 0, 1]
    assert outcome.placed[5].tolist() == [0, 1]
    assert set(outcome.about[1:5, 0].tolist()) == {5}


@pytest.mark.parametrize("policy", ["priority", "stretto", "srtf"])
def test_nobody_is_stopped_for_an_urgent_job_that_finds_no_place(policy: str) -> None:
    """Each node keeps one who may not be stopped."""
    jobs = [fragile(size=1, workers=1, remaining=1e6, ran_s=50.0)] * 2 + [narrow(10.0)] * 6
    jobs.append(job(size=1, width=4 * GPU, remaining=1.0, priority=9, **ELASTIC))
    placed = [[1, 0], [0, 1], *[[1, 0], [0, 1]] * 3, [0, 0]]
    outcome = decide(with_nodes([4, 4], jobs, placed), policy, placement="fewest-moves")
    assert outcome.workers.tolist() == [*[1] * 8, 0]


def test_nobody_is_stopped_for_an_urgent_job_without_what_only_the_site_knows_of() -> None:
    class Lacking:
        """There is something that the job in the last row would need, and does not get."""

        def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
            return np.vstack([placed[:-1], np.zeros_like(placed[-1:])])

        def after(self, view: Snapshot, placed: IntArray) -> Lacking:
            return self

    view = with_nodes([1], [narrow(10.0), job(size=1, remaining=1.0, priority=9, **ELASTIC)], [[1], [0]])
    chosen = Settings(placement="fewest-moves")
    outcome = cycle.decide(view, load("priority"), CycleState(), chosen, Lacking())
    assert outcome.workers.tolist() == [1, 0]


def test_shares_of_one_gpu_are_stopped_where_they_make_a_whole_one() -> None:
    half = [narrow(10.0, width=500), narrow(20.0, width=500), fragile(size=1, workers=1, width=500, ran_s=50.0)]
    urgent = job(size=1, remaining=1.0, priority=9, **ELASTIC)
    view = with_nodes([1, 1], [*half, urgent], [[0, 1], [1, 0], [0, 1], [0, 0]])
    outcome = decide(view, "priority", placement="fewest-moves")
    assert outcome.workers.tolist() == [1, 0, 1, 1]


def test_room_for_the_fixed_roles_of_an_urgent_job_is_made_as_well() -> None:
    jobs = [narrow(10.0), narrow(20.0), narrow(30.0)]
    jobs.append(job(size=1, fixed_milli=GPU, remaining=1.0, priority=9, **ELASTIC))
    assert decide(view_of(3, jobs), "priority").workers.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("policy", ["fifo", "priority", "srtf", "stretto"])
def test_an_urgent_job_gets_one_place_where_the_room_is_in_pieces(policy: str) -> None:
    urgent = fragile(size=1, width=2 * GPU, remaining=10.0, priority=9)
    view = with_nodes([2, 2], [narrow(50.0), narrow(20.0), urgent], [[1, 0], [0, 1], [0, 0]])
    outcome = decide(view, policy, placement="fewest-moves")
    assert outcome.workers.tolist() == [1, 0, 1]
    assert told(outcome, 1) == "stopped for a more urgent job (job 2): 20 s of its work are lost"
    equal = msgspec.structs.replace(view, priority=view.priority * 0)
    assert decide(equal, policy, placement="fewest-moves").workers.tolist() == [1, 1, 0]
    guarded = msgspec.structs.replace(view, preemptible=np.zeros(3, np.bool_))
    assert decide(guarded, policy, placement="fewest-moves").workers.tolist() == [1, 1, 0]


def test_nobody_is_stopped_who_need_not_be() -> None:
    jobs = [narrow(10.0), fragile(size=2, workers=2, remaining=1e6, ran_s=20.0, preemptible=True)]
    jobs.append(job(size=2, remaining=1.0, priority=9, **ELASTIC))
    assert decide(view_of(3, jobs), "priority").workers.tolist() == [1, 0, 2]


def in_pools(view: Snapshot, pools: list[int], capacity: list[int]) -> Snapshot:
    """Of two device types, only counted. A job that waits can run in the pool given for it only."""
    rates = np.repeat(view.rates, 2, axis=0)
    for j in np.flatnonzero(view.workers == 0).tolist():
        rates[1 - pools[j], view.curve[j]] = 0.0
    return msgspec.structs.replace(
        view,
        pools=("a", "b"),
        capacity=np.array(capacity, np.int64) * GPU,
        rates=rates,
        pool=np.where(view.workers > 0, pools, -1),
    )


def test_free_devices_of_another_pool_do_not_keep_an_urgent_job_waiting() -> None:
    urgent = job(size=1, remaining=1.0, priority=9, **ELASTIC)
    view = in_pools(view_of(1, [narrow(10.0), urgent]), [0, 0], [1, 8])
    outcome = decide(view, "sia")
    assert (outcome.workers.tolist(), outcome.pool.tolist()) == ([0, 1], [-1, 0])


# Nobody starves.


def small(**columns: Any) -> dict[str, Any]:
    return fragile(size=1, **columns)


@pytest.mark.parametrize(("length", "starts"), [(5.0, True), (1e4, False), (float("nan"), False)])
def test_others_start_before_a_reservation_only_if_they_end_before_it(length: float, starts: bool) -> None:
    view = _late_and_small(length)
    outcome = decide(view, "edf", CycleState(blocked={0: Wait(10.0)}))
    assert outcome.workers.tolist() == [0, 1, 1, int(starts)]
    if not starts:
        assert outcome.reason[3] == Reason.RESERVED_FOR
        assert outcome.about[3, 0] == 0
    young = decide(view, "edf", CycleState(blocked={0: Wait(99.0)}))
    assert young.workers[3] == 1, "not late yet"


def _late_and_small(length: float) -> Snapshot:
    """Under `edf` the first one would stop the two that run; they are pinned, and one slot is free."""
    wide = fragile(size=3, remaining=100.0, deadline_s=1e3)
    running = [small(workers=1, remaining=r, ran_s=50.0, deadline_s=1e4) for r in (10.0, 20.0)]
    return view_of(3, [wide, *running, small(remaining=length, deadline_s=2e4)], now_s=100.0)


def test_a_job_is_remembered_as_blocked_until_it_runs() -> None:
    view = _late_and_small(5.0)
    state = decide(view, "edf").state
    assert state.blocked == {0: Wait(100.0)}
    later = msgspec.structs.replace(view, now_s=150.0)
    assert decide(later, "edf", state).state.blocked == {0: Wait(100.0)}
    alone = view_of(3, [fragile(size=3, remaining=100.0, deadline_s=1e3)], now_s=200.0)
    assert decide(alone, "edf", state).state.blocked == {}


def test_a_promised_start_is_never_put_off_and_nobody_passes_after_it() -> None:
    """The last one would end before what is expected of the running jobs now, which have outlived what they said."""
    view = _late_and_small(5.0)
    state = decide(view, "edf", CycleState(blocked={0: Wait(10.0)})).state
    assert state.blocked == {0: Wait(10.0, promised_s=120.0, pool="gpu")}
    lying = msgspec.structs.replace(view, now_s=110.0, remaining=np.array([100.0, 500.0, 500.0, 5.0]))
    outcome = decide(lying, "edf", state)
    assert outcome.workers.tolist() == [0, 1, 1, 1], "it ends before the promised start"
    assert outcome.state.blocked == state.blocked
    late = decide(msgspec.structs.replace(lying, now_s=121.0), "edf", state)
    assert late.workers.tolist() == [0, 1, 1, 0]
    assert late.reason[3] == Reason.RESERVED_FOR
    sooner = msgspec.structs.replace(view, now_s=101.0, remaining=np.array([100.0, 1.0, 2.0, 5.0]))
    assert decide(sooner, "edf", state).state.blocked[0].promised_s == 103.0


def test_who_was_never_seen_to_keep_its_progress_does_not_pass_a_reservation() -> None:
    last = np.array([False, False, False, True])
    view = msgspec.structs.replace(_late_and_small(float("nan")), fragile=~last, preemptible=last)
    state = CycleState(blocked={0: Wait(10.0)})
    assert decide(view, "edf", state).workers.tolist() == [0, 1, 1, 1], "it keeps its progress"
    for doubt in ({"unproven": last}, {"preemptible": ~last}):
        doubtful = msgspec.structs.replace(view, **doubt)
        assert decide(doubtful, "edf", state).workers.tolist() == [0, 1, 1, 0]


def test_a_promise_holds_though_the_policy_prefers_others_by_now() -> None:
    promised = CycleState(blocked={0: Wait(10.0, promised_s=90.0)})
    jobs = [fragile(size=2, remaining=100.0), small(remaining=1.0), small(remaining=1.0)]
    view = view_of(2, jobs, now_s=100.0)
    assert decide(view, "srtf").workers.tolist() == [0, 1, 1]
    outcome = decide(view, "srtf", promised)
    assert outcome.workers.tolist() == [2, 0, 0]
    assert outcome.reason[0] == Reason.RUNS
    jobs[0] = fragile(size=2, workers=2, remaining=99.0, ran_s=1.0, start_s=1.0, changed_s=100.0)
    again = decide(view_of(2, jobs, now_s=101.0), "srtf", outcome.state)
    assert again.workers.tolist() == [2, 0, 0], "it is not stopped before it has work to lose"
    jobs[0] = fragile(size=2, workers=2, remaining=97.0, ran_s=3.0, start_s=1.0)
    assert decide(view_of(2, jobs, now_s=103.0), "srtf", again.state).state.blocked.keys() == {1, 2}


def test_who_was_started_by_a_reservation_may_be_stopped_and_resized_later_like_others() -> None:
    """One saves so often that it never has much to lose; the other is left its minimum, whatever happens."""
    begun = CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool="gpu")})
    others = [small(remaining=1.0), small(remaining=1.0)]
    saves = fragile(size=2, workers=2, remaining=1e5, start_s=5.0, lost_s=4.0, changed_s=100.0)
    for now_s, workers in ((101.0, [2, 0, 0]), (171.0, [0, 1, 1])):
        outcome = decide(view_of(2, [saves, *others], now_s=now_s), "srtf", begun)
        assert outcome.workers.tolist() == workers
    assert 0 not in outcome.state.blocked
    elastic = job(min_workers=1, max_workers=4, workers=4, remaining=1e4, changed_s=100.0, **ELASTIC)
    short = job(size=1, remaining=1.0, **ELASTIC)
    outcome = decide(view_of(4, [elastic, short], now_s=101.0), "elastic-srtf", begun)
    assert outcome.workers.tolist() == [3, 1]
    assert 0 not in outcome.state.blocked


def test_a_reservation_is_a_matter_of_its_pool() -> None:
    """Eight devices of another kind are free: the room of the late job is not, and who runs there passes it."""
    wide, running = fragile(size=2, remaining=1.0), small(workers=1, remaining=1e4, ran_s=50.0)
    jobs = [wide, running, small(remaining=1e5), small(remaining=1e5)]
    view = in_pools(view_of(1, jobs, now_s=100.0), [0, 0, 0, 1], [2, 8])
    outcome = decide(view, "sia", CycleState(blocked={0: Wait(10.0)}))
    assert outcome.workers.tolist() == [0, 1, 0, 1]
    assert outcome.state.blocked[0].promised_s == 1e4 + 100.0


def test_what_is_over_is_not_remembered() -> None:
    state = CycleState(blocked={0: Wait(10.0), 1: Wait(10.0), 7: Wait(10.0)})
    running = view_of(1, [job(size=1, workers=1), job(size=1)])
    assert decide(running, "fifo", state).state.blocked.keys() == {1}
    nobody = view_of(1, [])
    assert decide(nobody, "fifo", state).state.blocked == {}
    plain = with_nodes([1], [job(size=1, width=0, demand=(1000, 0, 0))], [[1]], cpu_milli=[4000])
    assert decide(plain, "fifo", state, placement="fewest-moves").state.blocked == {}


def _crowded(*waiting: dict[str, Any]) -> list[dict[str, Any]]:
    """Two slots are held by jobs that may not be stopped; `srtf` would stop neither for those that wait."""
    running = [small(workers=1, remaining=r, ran_s=50.0) for r in (10.0, 20.0)]
    return [*running, *waiting]


def test_who_finds_no_room_for_a_minute_gets_a_reservation_whatever_its_policy_prefers() -> None:
    view = view_of(2, _crowded(fragile(size=2, remaining=1e6), small(remaining=30.0)), now_s=100.0)
    state = decide(view, "srtf").state
    assert state.blocked == {2: Wait(100.0, wished=False), 3: Wait(100.0, wished=False)}
    one_ends = msgspec.structs.replace(services.only(view, view.job != 0), now_s=160.0)
    early = decide(one_ends, "srtf", CycleState(blocked={2: Wait(101.0, wished=False)}))
    assert early.workers.tolist() == [1, 0, 1], "not late yet"
    outcome = decide(one_ends, "srtf", state)
    assert outcome.workers.tolist() == [1, 0, 0]
    assert outcome.state.blocked[2].promised_s == 180.0
    assert told(outcome, 1) == "has a reservation for 2 GPUs: expected to start in about 20 s, when job 1 ends"
    assert told(outcome, 2) == (
        "waits: job 2 has a reservation for 2 GPUs and comes first, expected to start in about 20 s"
    )


def test_the_expected_start_is_told_also_when_the_promised_one_is_over() -> None:
    view = view_of(2, _crowded(fragile(size=2, remaining=1e6)), now_s=100.0)
    outcome = decide(view, "srtf", CycleState(blocked={2: Wait(10.0, promised_s=90.0)}))
    assert told(outcome, 2) == "has a reservation for 2 GPUs: expected to start in about 20 s, when job 1 ends"


def test_a_start_that_nothing_is_waited_for_is_not_said_to_be_near() -> None:
    """A more urgent job is in the way that keeps its progress: nobody knows for how long."""
    pair = fragile(size=1, width=2 * GPU, remaining=1e6)
    urgent = job(size=1, workers=1, remaining=1e6, priority=9, lost_s=0.0, fragile=False, preemptible=True)
    view = view_of(2, [pair, urgent, small(remaining=30.0)], now_s=100.0)
    outcome = decide(view, "priority", CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool="gpu")}))
    assert outcome.workers.tolist() == [0, 1, 0]
    for j in (0, 2):
        assert "expected to start at a time that nobody knows" in told(outcome, j)


def test_who_waits_for_pinned_jobs_is_told_of_those_in_its_pool() -> None:
    running = [small(workers=1, remaining=1e4, ran_s=50.0) for _ in range(4)]
    view = in_pools(view_of(1, [*running, small(remaining=1.0)]), [0, 0, 0, 1, 1], [3, 1])
    outcome = decide(view, "sia")
    assert told(outcome, 4) == "waits: it needs 1 GPU, and 1 is held by jobs that would lose their work (job 3)"


@pytest.mark.parametrize("policy", ["fit-first", "srtf", "stretto", "tiresias"])
def test_nobody_waits_for_a_job_whose_nodes_it_cannot_get(policy: str) -> None:
    pair, running = fragile(size=1, width=2 * GPU, remaining=1e3), fragile(size=2, workers=2, remaining=7e4, ran_s=50.0)
    jobs = [pair, running, small(remaining=float("nan")), small(remaining=float("nan"))]
    reach = np.array([[True, False]] * 3 + [[False, True]])
    view = msgspec.structs.replace(with_nodes([2, 4], jobs, [[0, 0], [2, 0], [0, 0], [0, 0]]), now_s=100.0, reach=reach)
    promised = CycleState(blocked={0: Wait(10.0, no_place=True, promised_s=90.0)})
    outcome = decide(view, policy, promised, placement="fewest-moves")
    assert outcome.workers.tolist() == [0, 2, 0, 1]


def test_whom_a_policy_passes_over_though_there_is_room_waits_by_its_own_rule() -> None:
    jobs = [small(workers=1, remaining=10.0, ran_s=50.0), small(remaining=1e6), small(remaining=1.0)]
    watched = CycleState(blocked={1: Wait(10.0, wished=False), 2: Wait(90.0, wished=False)})
    outcome = decide(view_of(2, jobs, now_s=100.0), "srtf", watched)
    assert outcome.workers.tolist() == [1, 0, 1]
    assert outcome.state.blocked == {}


def test_nobody_waits_for_a_job_that_has_no_places_or_no_room_beside_services() -> None:
    pair = fragile(size=1, width=2 * GPU, remaining=1e6)
    view = with_nodes([1, 1], _crowded(pair, small(remaining=30.0)), [[1, 0], [0, 1], [0, 0], [0, 0]])
    one_ends = msgspec.structs.replace(services.only(view, view.job != 0), now_s=160.0)
    late = CycleState(blocked={2: Wait(10.0, wished=False)})
    assert decide(one_ends, "srtf", late, placement="pack").workers.tolist() == [1, 0, 1]
    service = job(size=1, workers=1, is_service=True, wanted=1, preemptible=False)
    jobs = [service, fragile(size=2, remaining=1e6), small(remaining=30.0)]
    beside = decide(view_of(2, jobs, now_s=160.0), "srtf", CycleState(blocked={1: Wait(10.0, wished=False)}))
    assert beside.workers.tolist() == [1, 0, 1]


@pytest.mark.parametrize("policy", ["fit-first", "srtf", "stretto", "tiresias"])
def test_a_promise_ends_with_the_last_place_of_its_job(policy: str) -> None:
    """Nodes were lost, or the only one that could hold it is closed: the others start, and it counts on."""
    jobs = [fragile(size=8, remaining=1e3), *(small(remaining=5.0) for _ in range(3))]
    promised = CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool="gpu")})
    counted = decide(view_of(4, jobs, now_s=100.0), policy, promised)
    quad = [fragile(size=1, width=4 * GPU, remaining=1e3), small(workers=1, remaining=50.0, ran_s=50.0)]
    view = with_nodes([4, 2, 2], [*quad, *jobs[1:]], [[0, 0, 0], [0, 1, 0], *([0, 0, 0] for _ in jobs[1:])])
    reach = np.repeat([[False, True, True]], len(view), axis=0)
    closed = msgspec.structs.replace(view, now_s=100.0, reach=reach)
    placed = decide(closed, policy, promised, placement="fewest-moves")
    for outcome, running in ((counted, 3), (placed, 4)):
        assert msgspec.structs.replace(outcome.state.blocked[0], no_place=False) == Wait(10.0)
        assert outcome.workers.sum() == running


def test_a_promise_holds_in_its_pool_wherever_that_stands_by_now() -> None:
    """The first of three pools is gone; the job makes progress in what is the first now."""
    jobs = [fragile(size=2, remaining=1e3), small(remaining=5.0), small(remaining=5.0)]
    view = in_pools(view_of(1, jobs, now_s=100.0), [0, 1, 1], [2, 2])
    for pool in ("a", "b", "gone", 1):
        outcome = decide(view, "sia", CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool=pool)}))
        assert outcome.pool[0] == 0
    full = [jobs[0], *(small(workers=1, remaining=500.0, ran_s=50.0) for _ in range(2)), jobs[1]]
    view = in_pools(view_of(1, full, now_s=100.0), [0, 0, 0, 1], [2, 2])
    for promised in ("b", 1):
        outcome = decide(view, "srtf", CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool=promised)}))
        assert outcome.workers[0] == 0, "not where it makes no progress"
        assert outcome.state.blocked[0] == Wait(10.0, promised_s=90.0, pool="a")


def test_nobody_waits_for_a_job_whose_pool_is_gone() -> None:
    view = view_of(2, [fragile(size=2, remaining=1e3), small(remaining=5.0)], now_s=100.0)
    rates = view.rates.copy()
    rates[0, 0] = 0.0
    left = msgspec.structs.replace(view, pools=("b",), rates=rates)
    outcome = decide(left, "srtf", CycleState(blocked={0: Wait(10.0, promised_s=90.0, pool="a")}))
    assert outcome.workers[1] == 1
    assert not outcome.state.blocked[0].is_promised


def test_what_is_too_large_beside_pinned_jobs_may_run_when_they_end() -> None:
    """`elastic-srtf` would stop the longer ones for the short job, and is asked again about the room that is left."""
    held = [small(workers=1, remaining=1e4, ran_s=50.0) for _ in range(5)]
    jobs = [*held, fragile(size=4, remaining=1e6), small(remaining=1.0)]
    outcome = decide(view_of(5, jobs, now_s=100.0), "elastic-srtf")
    assert told(outcome, 5) == (
        "waits: it needs 4 GPUs, and 5 are held by jobs that would lose their work (job 0, job 1, job 2 and 2 more)"
    )
    never = decide(view_of(3, [*held[:3], *jobs[5:]], now_s=100.0), "elastic-srtf")
    assert told(never, 3) == "can never run here: it needs 4 GPUs, the cluster has 3"


# Jobs without GPUs.


def test_jobs_without_gpus_share_the_cores_of_a_gpu_node() -> None:
    plain = {"width": 0, "demand": (1000, 0, 0)}
    first = job(min_workers=1, max_workers=16, workers=16, remaining=1e4, **plain)
    view = with_nodes([1], [first, job(size=8, remaining=10.0, **plain)], [[16], [0]], cpu_milli=[16000])
    outcome = decide(view, "stretto", placement="fewest-moves")
    assert outcome.workers.tolist() == [8, 8]
    assert outcome.placed.tolist() == [[8], [8]]


def test_gpus_come_first_and_cores_are_what_they_leave() -> None:
    gpu = job(size=1, demand=(3000, 0, 0))
    plain = job(min_workers=1, max_workers=8, width=0, demand=(1000, 0, 0))
    view = with_nodes([1], [plain, gpu], [[0], [0]], cpu_milli=[4000])
    outcome = decide(view, "elastic-fifo", placement="fewest-moves")
    assert outcome.workers.tolist() == [1, 1]


# Sizes.


def test_nobody_gets_more_workers_than_make_it_faster() -> None:
    peak = job(min_workers=1, max_workers=8, rate=[0, 10, 18, 20, 20.1, 15, 12, 9, 6], remaining=1e6)
    falls = job(min_workers=1, max_workers=8, rate=[0, 10, 6, 5, 4, 3, 3, 3, 3], remaining=1e6)
    view = msgspec.structs.replace(view_of(16, [peak, falls]), falls=True)
    assert decide(view, "stretto").workers.tolist() == [3, 1]
    assert decide(view, "elastic-fifo").workers.tolist() == [3, 1]


# For every policy.


@st.composite
def lossy(draw: st.DrawFn, placed: bool) -> Snapshot:
    view = draw(snapshots(placed=placed, overfull=False))
    n = len(view)
    fragile = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    lost = np.where(fragile & (view.workers > 0), view.ran_s, 0.0)
    preemptible = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    # Where workers are drawn fixed roles have no place of their own.
    none = np.zeros(n, np.int64)
    unproven = ~fragile & np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), np.bool_)
    return msgspec.structs.replace(
        view, lost_s=lost, fragile=fragile, unproven=unproven, preemptible=preemptible, fixed_milli=none
    )


@st.composite
def waits(draw: st.DrawFn, view: Snapshot) -> CycleState:
    """Some of those that wait were blocked, and some of these promised a start."""
    blocked = {}
    for number in view.job[view.workers == 0].tolist():
        if draw(st.booleans()):
            promised_s = view.now_s + draw(st.sampled_from([-10.0, 10.0, np.inf]))
            blocked[number] = Wait(view.now_s - draw(st.sampled_from([10.0, 100.0])), promised_s=promised_s)
    return CycleState(blocked=blocked)


@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_policy_takes_work_from_an_equal(name: str, data: st.DataObject) -> None:
    placed = data.draw(st.booleans())
    view = data.draw(lossy(placed))
    state = data.draw(waits(view))
    outcome = decide(view, name, state, placement="fewest-moves" if placed else "")
    changed = (outcome.workers != view.workers) | (outcome.pool != view.pool)
    if placed:
        changed |= (outcome.placed != view.placed).any(axis=1)
    for j in np.flatnonzero(view.pinned & changed).tolist():
        assert outcome.workers[j] == 0, "whoever is pinned keeps its size and place, or is stopped"
        assert view.preemptible is not None
        assert view.preemptible[j]
        urgent = outcome.about[j, 0]
        assert view.priority[view.job == urgent][0] > view.priority[j]
        assert outcome.workers[view.job == urgent][0] > 0
    assert view.fragile is not None
    assert view.preemptible is not None
    guarded = (view.workers > 0) & ~view.fragile & ~view.preemptible
    assert (outcome.workers >= view.min_workers)[guarded].all()
    assert set(outcome.state.blocked) <= set(view.job.tolist())
    used = view.used_milli(outcome.workers, np.maximum(outcome.pool, 0))
    assert (used <= view.capacity).all()
    again = decide(view, name, state, placement="fewest-moves" if placed else "")
    assert again.workers.tolist() == outcome.workers.tolist()
