from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings

from policy_checks import answer, run, watched, why, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace

NAME = "backfill-conservative"


def test_a_job_may_not_delay_others_than_the_head_either() -> None:
    """6 of 8 GPUs are in use until second 10. Then the head (4 GPUs) starts, and the third (3) beside it; the second
    (5) after the head, at 20. The last job, 2 GPUs for 21 s, fits beside the head, and EASY lets it pass; but it would
    delay the third.
    """
    jobs = [
        job(size=6, workers=6, remaining=60),
        job(size=4, remaining=40),
        job(size=5, remaining=500),
        job(size=3, remaining=300),
        job(size=2, remaining=42),
    ]
    decision = answer(NAME, view_of(8, jobs))
    assert decision.workers.tolist() == [6, 0, 0, 0, 0]
    assert [why(decision, j) for j in (1, 2, 3)] == [Reason.RESERVED] * 3
    assert decision.detail[1:4].tolist() == [[4, 10], [5, 20], [3, 10]]
    assert why(decision, 4) is Reason.WOULD_DELAY
    assert decision.detail[4].tolist() == [10, 110]
    assert workers_of("backfill-easy", view_of(8, jobs)) == [6, 0, 0, 0, 2]


def test_a_job_that_delays_nobody_starts() -> None:
    jobs = [job(size=6, workers=6, remaining=60), job(size=4), job(size=2, remaining=20)]
    decision = answer(NAME, view_of(8, jobs))
    assert decision.workers.tolist() == [6, 0, 2]
    assert why(decision, 2) is Reason.BACKFILLED
    assert decision.detail[2, 0] == 10


def test_unknown_lengths_need_their_room_for_ever() -> None:
    jobs = [
        job(size=4, workers=4, remaining=math.nan),
        job(size=8, remaining=10.0),
        job(size=1, remaining=math.nan),
        job(size=1, remaining=1e9),
    ]
    decision = answer(NAME, view_of(8, jobs))
    assert decision.workers.tolist() == [4, 0, 0, 1]
    assert decision.detail[1].tolist() == [8, math.inf]
    assert why(decision, 2) is Reason.WOULD_DELAY


def slow(view: Snapshot) -> tuple[list[int], list[float]]:
    """Reservations as a list of intervals, searched moment by moment; for known lengths."""
    need = view.need.tolist()
    length = (view.start_s + view.remaining_s(view.requested)).tolist()
    booked = []
    for j in np.flatnonzero(view.workers).tolist():
        pause = max(0.0, float(view.changed_s[j] + view.start_s[j]) - view.now_s)
        end = view.now_s + pause + float(view.remaining_s(view.workers)[j])
        booked.append((need[j], view.now_s, max(end, view.now_s + 1e-6)))
    workers, starts = view.workers.tolist(), [math.nan] * len(view)
    for j in range(len(view)):
        if view.workers[j] or need[j] > view.total_milli:
            continue
        for at in sorted({view.now_s, *(end for _, _, end in booked)}):
            moments = [at, *(t for _, begin, _ in booked for t in [begin] if at < t < at + length[j] - 1e-6)]
            if all(
                need[j] <= view.total_milli - sum(n for n, begin, end in booked if begin <= t < end - 1e-9)
                for t in moments
            ):
                break
        starts[j] = at
        booked.append((need[j], at, at + max(length[j], 1e-6)))
        if at == view.now_s:
            workers[j] = int(view.requested[j])
    return workers, starts


@given(snapshots(elastic=False, known=True, overfull=False, max_jobs=8))
def test_equals_a_plain_search(view: Snapshot) -> None:
    decision = answer(NAME, view)
    workers, starts = slow(view)
    assert decision.workers.tolist() == workers
    for j in np.flatnonzero(decision.reason == Reason.RESERVED).tolist():
        assert math.isclose(view.now_s + decision.detail[j, 1], starts[j], abs_tol=1e-3)


@given(snapshots(elastic=False))
def test_any_snapshot(view: Snapshot) -> None:
    answer(NAME, view)


@settings(max_examples=40)
@given(traces(elastic=False))
def test_nobody_starts_later_than_first_promised(trace: Trace) -> None:
    log: list[tuple[Snapshot, Decision]] = []
    result = simulate(trace, *cluster.parse("1x8"), watched(NAME, log))
    promised: dict[int, float] = {}
    for view, decision in log:
        for j in np.flatnonzero(decision.workers == 0).tolist():
            assert Reason(int(decision.reason[j])) in (Reason.RESERVED, Reason.WOULD_DELAY)
            promised.setdefault(int(view.job[j]), view.now_s + float(decision.detail[j, 1]))
    for number, at_s in promised.items():
        assert result.start_s[number] <= at_s + 1e-3
    assert not result.preemptions.any()


def test_a_trace_by_hand() -> None:
    """As the decision above. Under EASY the last job starts at once, and the third at its end instead of at 10."""
    work = [60.0, 40.0, 500.0, 300.0, 42.0]
    trace = trace_of([{"requested": r, "work": w} for r, w in zip([6, 4, 5, 3, 2], work, strict=True)])
    assert run(NAME, trace).start_s.tolist() == [0, 10, 20, 10, 110]
    assert run("backfill-easy", trace).start_s.tolist() == [0, 10, 20, 21, 0]
