from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from policy_checks import (
    answer,
    check_ends,
    check_order,
    check_uncontended,
    check_work_conserving,
    run,
    why,
    workers_of,
)
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot
from stretto.sim.trace import Trace

NAME = "elastic-fifo"


def test_two_jobs_of_four_on_six_gpus_overlap() -> None:
    result = run(NAME, trace_of([{"max_workers": 4, "work": 24}] * 2), "1x6")
    assert result.start_s.tolist() == [0, 0]
    assert result.finish_s.tolist() == [8, 8]


def test_the_last_turn_ends_with_the_room() -> None:
    assert workers_of(NAME, view_of(7, [job(max_workers=4)] * 2)) == [4, 3]


def test_who_did_not_get_its_minimum_gets_nothing() -> None:
    """The second job would be given two single GPUs if turns included those left out."""
    jobs = [job(max_workers=8), job(size=8), job(max_workers=2)]
    decision = answer(NAME, view_of(8, jobs))
    assert decision.workers.tolist() == [6, 0, 2]
    assert [why(decision, j) for j in range(3)] == [Reason.FAIR_SHARE, Reason.NO_ROOM, Reason.AT_MAXIMUM]
    assert decision.detail[1].tolist() == [8, 7]


def test_running_jobs_shrink_to_let_a_newcomer_in() -> None:
    assert workers_of(NAME, view_of(8, [job(max_workers=8, workers=8), job(min_workers=3, max_workers=3)])) == [5, 3]


def test_a_later_job_is_stopped_only_for_an_earlier_minimum() -> None:
    jobs = [job(min_workers=4, max_workers=8), job(min_workers=3, max_workers=3, workers=3)]
    decision = answer(NAME, view_of(6, jobs))
    assert decision.workers.tolist() == [6, 0]
    assert why(decision, 1) is Reason.PREEMPTED
    assert decision.detail[1].tolist() == [3, 2]


def test_nobody_gets_workers_that_add_no_speed() -> None:
    jobs = [job(max_workers=8, rate=[0, 1, 2, 2]), job(max_workers=8)]
    assert workers_of(NAME, view_of(8, jobs)) == [2, 6]


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    check_order(NAME, view, np.arange(len(view)))
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@settings(max_examples=30)
@given(traces())
def test_every_trace_ends(trace: Trace) -> None:
    check_ends(NAME, trace)
