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

NAME = "backfill-easy"


def head_blocked(*later: dict[str, float]) -> Snapshot:
    """8 GPUs; 5 are in use until second 10 and 1 until second 30; the head needs 6, so it starts at 10 beside 1."""
    running = [job(size=5, workers=5, remaining=50), job(size=1, workers=1, remaining=30)]
    return view_of(8, [*running, job(size=6, remaining=100), *later])


def test_a_job_that_ends_before_the_shadow_time_starts() -> None:
    decision = answer(NAME, head_blocked(job(size=2, remaining=20), job(size=1, remaining=1)))
    assert decision.workers.tolist() == [5, 1, 0, 2, 0]
    assert why(decision, 2) is Reason.RESERVED
    assert decision.detail[2].tolist() == [6, 10]
    assert why(decision, 3) is Reason.BACKFILLED
    assert why(decision, 4) is Reason.NO_ROOM


def test_a_longer_job_starts_only_beside_the_reservation() -> None:
    wide = answer(NAME, head_blocked(job(size=2, remaining=22)))
    assert wide.workers.tolist() == [5, 1, 0, 0]
    assert why(wide, 3) is Reason.WOULD_DELAY
    assert wide.detail[3].tolist() == [10, 2]
    assert workers_of(NAME, head_blocked(job(size=1, remaining=11), job(size=1, remaining=11))) == [5, 1, 0, 1, 0]


def test_an_unknown_length_may_only_use_what_the_head_leaves() -> None:
    assert workers_of(NAME, head_blocked(job(size=1, remaining=math.nan))) == [5, 1, 0, 1]
    assert workers_of(NAME, head_blocked(job(size=2, remaining=math.nan))) == [5, 1, 0, 0]


def test_running_jobs_of_unknown_length_end_oldest_first_and_are_not_topped_up() -> None:
    """The head fits once job 0 ends; job 1 was let in beside it, and nothing more may be."""
    jobs = [
        job(size=4, workers=4, remaining=math.nan, started_s=0),
        job(size=5, submit_s=1.0),
        job(size=3, workers=3, remaining=math.nan, submit_s=2.0),
        job(size=1, remaining=math.nan, submit_s=3.0),
        job(size=1, remaining=10.0, submit_s=3.0),
    ]
    decision = answer(NAME, view_of(8, jobs, now_s=4.0))
    assert decision.workers.tolist() == [4, 0, 3, 0, 1]
    assert decision.detail[1].tolist() == [5, math.inf]


def test_starting_costs_count() -> None:
    late = job(size=2, remaining=18, start_s=1.0)
    assert workers_of(NAME, head_blocked(late)) == [5, 1, 0, 2]
    assert workers_of(NAME, head_blocked(late | {"start_s": 1.5})) == [5, 1, 0, 0]
    just_started = [job(size=5, workers=5, remaining=50, start_s=4.0, changed_s=0.0), job(size=6)]
    assert answer(NAME, view_of(8, just_started, now_s=1.0)).detail[1].tolist() == [6, 13]


def test_nobody_waits_behind_a_job_that_is_too_large() -> None:
    decision = answer(NAME, view_of(4, [job(size=5), job(size=4)]))
    assert decision.workers.tolist() == [0, 4]
    assert why(decision, 0) is Reason.TOO_LARGE


def slow(view: Snapshot) -> list[int]:
    """The definition, word for word, for known lengths."""
    need = view.need.tolist()
    length = (view.start_s + view.remaining_s(view.requested)).tolist()
    running = dict.fromkeys(np.flatnonzero(view.workers).tolist(), 0.0)
    for j in running:
        pause = max(0.0, float(view.changed_s[j] + view.start_s[j]) - view.now_s)
        running[j] = view.now_s + pause + float(view.remaining_s(view.workers)[j])
    queue = [j for j in range(len(view)) if j not in running and need[j] <= view.total_milli]

    def free() -> int:
        return view.total_milli - sum(need[j] for j in running)

    while queue and need[queue[0]] <= free():
        j = queue.pop(0)
        running[j] = view.now_s + length[j]
    if queue:
        head = queue.pop(0)
        for shadow in sorted(running.values()):
            extra = view.total_milli - sum(need[j] for j, end in running.items() if end > shadow + 1e-6) - need[head]
            if extra >= 0:
                break
        for j in queue:
            ends_in_time = view.now_s + length[j] <= shadow + 1e-6
            if need[j] <= free() and (ends_in_time or need[j] <= extra):
                running[j] = view.now_s + length[j]
                extra -= 0 if ends_in_time else need[j]
    return [int(view.requested[j]) if j in running else 0 for j in range(len(view))]


@given(snapshots(elastic=False, known=True, overfull=False))
def test_equals_the_definition(view: Snapshot) -> None:
    assert workers_of(NAME, view) == slow(view)


@given(snapshots(elastic=False))
def test_any_snapshot(view: Snapshot) -> None:
    answer(NAME, view)


@settings(max_examples=40)
@given(traces(elastic=False))
def test_the_head_starts_no_later_than_its_reservation(trace: Trace) -> None:
    log: list[tuple[Snapshot, Decision]] = []
    result = simulate(trace, *cluster.parse("1x8"), watched(NAME, log))
    for view, decision in log:
        for j in np.flatnonzero(decision.reason == Reason.RESERVED).tolist():
            assert result.start_s[view.job[j]] <= view.now_s + decision.detail[j, 1] + 1e-3
    assert not result.preemptions.any()


def test_a_trace_by_hand() -> None:
    """6 GPUs for 10 s; then all 8. Of two jobs of 2 GPUs the one of 11 s would delay that, the one of 10 s does not."""
    asked, work = [6, 8, 2, 2], [60.0, 40.0, 22.0, 20.0]
    trace = trace_of([{"requested": r, "work": w} for r, w in zip(asked, work, strict=True)])
    assert run(NAME, trace).start_s.tolist() == [0, 10, 15, 0]
    assert run("gang", trace).start_s.tolist() == [0, 20, 0, 10]
