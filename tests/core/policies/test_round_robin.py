from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import answer, need_of, run, why, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.policies.round_robin import Kept
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot
from stretto.errors import UsageError
from stretto.sim.trace import Trace

NAME = "round-robin"


def test_two_jobs_of_four_on_six_gpus_take_turns() -> None:
    trace = trace_of([{"requested": 4, "work": 80}] * 2)
    result = run(NAME, trace, "1x6", {"quantum_s": 10})
    assert result.start_s.tolist() == [0, 10]
    assert result.finish_s.tolist() == [30, 40]
    assert result.preemptions.tolist() == [1, 1]


def test_while_all_fit_there_are_no_slices() -> None:
    trace = trace_of([{"requested": 4, "work": 4e6}] * 2)
    result = run(NAME, trace, "1x8")
    assert result.finish_s.tolist() == [1e6, 1e6]
    assert result.decisions <= 2


def test_a_newcomer_waits_for_the_end_of_a_slice_and_the_slice_begins_with_it() -> None:
    trace = trace_of([{"requested": 4, "work": 400}, {"requested": 4, "work": 40, "submit_s": 25.0}])
    result = run(NAME, trace, "1x6", {"quantum_s": 10})
    assert result.start_s.tolist() == [0, 35]
    assert result.finish_s.tolist() == [110, 45]


def test_room_that_gets_free_is_used_within_a_slice() -> None:
    trace = trace_of([{"requested": 4, "work": 12}, {"requested": 4, "work": 400}])
    assert run(NAME, trace, "1x6").start_s.tolist() == [0, 3]


JOBS = [job(size=1, workers=1), job(size=8), job(size=1, workers=1), job(size=1)]


def test_the_first_job_left_out_comes_first_next_time() -> None:
    """At the end of the slice the wide job goes before everybody, though narrow ones would fill the cluster."""
    view = view_of(8, JOBS, now_s=60.0)
    kept = Kept(np.arange(4), 60.0)
    decision = answer(NAME, view, kept)
    assert decision.workers.tolist() == [0, 8, 0, 0]
    assert decision.memory.queue.tolist() == [1, 3, 0, 2]
    assert decision.wake_s == 120.0
    assert [why(decision, j) for j in range(4)] == [Reason.WAITS_FOR_TURN, Reason.RUNS] + [Reason.WAITS_FOR_TURN] * 2
    assert decision.detail[[3, 0, 2], 0].tolist() == [0, 1, 2]


def test_newcomers_join_at_the_tail() -> None:
    view = view_of(8, [job(size=8, workers=8), job(size=8), job(size=8)], now_s=60.0)
    decision = answer(NAME, view, Kept(np.array([0, 1]), 60.0))
    assert decision.workers.tolist() == [0, 8, 0]
    assert decision.memory.queue.tolist() == [1, 2, 0]


def test_skip_and_stop() -> None:
    view = view_of(8, JOBS, now_s=30.0)
    kept = Kept(np.arange(4), 60.0)
    assert workers_of(NAME, view, kept) == [1, 0, 1, 1]
    assert workers_of(NAME, view, kept, admission="stop") == [1, 0, 1, 0]
    assert answer(NAME, view, kept).wake_s == 60.0


def test_a_job_too_large_is_no_reason_for_slices() -> None:
    decision = answer(NAME, view_of(4, [job(size=5), job(size=4)]))
    assert decision.workers.tolist() == [0, 4]
    assert decision.wake_s == math.inf


def test_a_slice_must_have_a_length() -> None:
    with pytest.raises(UsageError, match="quantum_s"):
        answer(NAME, view_of(1, []), quantum_s=0)


@given(snapshots(elastic=False), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_any_snapshot(view: Snapshot, over: bool, stop: bool, random: Random) -> None:
    queue = [*view.job[: len(view) // 2].tolist(), 10**6]
    random.shuffle(queue)
    kept = Kept(np.array(queue), view.now_s if over else view.now_s + 1)
    decision = answer(NAME, view, kept, admission="stop" if stop else "skip")
    assert sorted(decision.memory.queue.tolist()) == view.job.tolist()
    if not stop:
        free = view.total_milli - int(need_of(view, decision.workers).sum())
        assert (need_of(view, view.requested)[decision.workers == 0] > free).all()


@settings(max_examples=40)
@given(traces(elastic=False), st.sampled_from(["skip", "stop"]))
def test_every_job_starts_within_as_many_slices_as_there_are_jobs(trace: Trace, admission: str) -> None:
    result = run(NAME, trace, settings={"quantum_s": 10, "admission": admission})
    assert (result.start_s - trace.submit_s <= 10 * len(trace) + 1e-6).all()
