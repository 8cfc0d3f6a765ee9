from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import answer, check_ends, check_uncontended, check_work_conserving, run, why, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.policies.themis import Kept, expected_work, speed_on, unfairness
from stretto.core.reasons import Reason
from stretto.core.snapshot import History, Snapshot
from stretto.errors import UsageError
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

NAME = "themis"


def test_rho_by_hand() -> None:
    """Two jobs on 4 GPUs: an equal share is 2, and 2 steps/s.

    The first is 100 s old and half done: (100 + 50) / 100. The second is new: 50 / 50. The third is as the first, but
    was alone for half of its life: its share was 4 GPUs / 1.5, and 1.5 times 100 / 4 s its time alone.
    """
    jobs = [job(max_workers=4, done=100.0), job(max_workers=4, submit_s=100.0)]
    view = view_of(4, jobs, now_s=100.0)
    assert unfairness(view, view.remaining, np.array([200.0, 0.0])).tolist() == [1.5, 1.0]
    assert unfairness(view, view.remaining, np.array([150.0, 0.0])).tolist() == [150 / 75, 1.0]


def test_speed_on_part_of_a_worker() -> None:
    view = view_of(8, [job(min_workers=2, max_workers=4, rate=[0, 0, 2, 3, 3.5])])
    shares = [1.0, 2.0, 2.5, 4.0, 9.0]
    assert [float(speed_on(view, np.array([share]))[0]) for share in shares] == [1.0, 2.0, 2.5, 3.5, 3.5]


def test_contention_is_averaged_over_a_jobs_life() -> None:
    """One other job at first, then three in all, counted from a newcomer's arrival on."""
    view = view_of(8, [job(), job(submit_s=80.0)], now_s=100.0)
    kept = Kept(50.0, 3, np.array([0, 7]), np.array([100.0, 0.0]), np.zeros(2))
    assert answer(NAME, view, kept).memory.crowd_s.tolist() == [100 + 3 * 50, 2 * 20]


def test_workers_are_leased() -> None:
    """The newcomer waits for the end of the lease; it is then worst off, and the rest is offered to it alone."""
    trace = trace_of([{"max_workers": 8, "work": 80_000}, {"max_workers": 8, "work": 80_000, "submit_s": 100.0}])
    result = run(NAME, trace, world=Settings(record=True))
    assert result.start_s.tolist() == [0, 1200]
    assert [(c.at_s, c.job, c.workers) for c in result.changes[:3]] == [(0, 0, 8), (1200, 0, 1), (1200, 1, 7)]


def test_a_lease_that_ended_unnoticed_holds_nobody_up() -> None:
    trace = trace_of([{"max_workers": 8, "work": 80_000}, {"max_workers": 8, "work": 80_000, "submit_s": 5000.0}])
    assert run(NAME, trace).start_s.tolist() == [0, 5000]


def test_leases_run_on_and_are_renewed() -> None:
    view = view_of(8, [job(max_workers=8, workers=6), job(min_workers=2, max_workers=8, workers=2)], now_s=100.0)
    kept = Kept(90.0, 2, np.array([0, 1]), np.array([200.0, 200.0]), np.array([100.0, 700.0]))
    decision = answer(NAME, view, kept, lease_s=500)
    assert decision.workers[1] == 2
    assert decision.memory.until_s.tolist() == [600.0, 700.0]
    assert decision.wake_s == 600.0


def ten_jobs(late: int) -> Snapshot:
    """Equal jobs, of which one has made no progress in 1000 s."""
    return view_of(20, [job(max_workers=20, done=0.0 if j == late else 2000.0) for j in range(10)], now_s=1000.0)


def test_the_worst_off_are_offered_the_rest() -> None:
    decision = answer(NAME, ten_jobs(late=6), fairness=0.9)
    assert decision.workers.tolist() == [1] * 6 + [11] + [1] * 3
    assert why(decision, 6) is Reason.BEHIND_FAIR_SHARE
    assert decision.detail[6].tolist() == [(1000 + 50) / 50] * 2
    assert why(decision, 0) is Reason.FAIR_SHARE


def test_they_are_offered_no_more_than_they_asked_for() -> None:
    """Beyond 4 the late job competes like all others, and its long wait makes every further worker matter less."""
    jobs = [job(max_workers=20, requested=4, done=0.0 if j == 6 else 2000.0) for j in range(10)]
    assert workers_of(NAME, view_of(13, jobs, now_s=1000.0), fairness=0.9) == [1] * 6 + [4] + [1] * 3
    fresh = [job(max_workers=20, requested=4, submit_s=1000.0) for _ in range(9)]
    late = job(max_workers=20, requested=4)
    assert workers_of(NAME, view_of(22, [late, *fresh], now_s=1000.0), fairness=0.9) == [4] + [2] * 9


def test_what_they_cannot_use_goes_to_the_others() -> None:
    jobs = [job(max_workers=3)] + [job(max_workers=20, submit_s=500.0)] * 3
    decision = answer(NAME, view_of(12, jobs, now_s=1000.0))
    assert decision.workers.tolist() == [3, 3, 3, 3]


def test_unknown_lengths_come_from_the_class() -> None:
    """The median of those that were longer; beyond all of them as long again; of another class if its own is new."""
    history = History()
    for number, size_s in enumerate([10.0, 20.0, 40.0]):
        history = history.adding(0, number, 0.0, size_s)
    unknown = [
        job(done=15.0, remaining=math.nan),
        job(done=50.0, remaining=math.nan),
        job(done=100.0, remaining=math.nan),
        job(done=0.0, remaining=math.nan, klass=1),
        job(done=15.0, remaining=7.0),
        job(done=0.0, remaining=math.nan, min_workers=2, max_workers=2),
    ]
    assert expected_work(view_of(8, unknown, history=history)).tolist() == [15.0, 60.0, 100.0, 20.0, 7.0, 40.0]
    assert expected_work(view_of(8, unknown[:4])).tolist() == [60.0, 60.0, 100.0, 60.0]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="fairness"):
        answer(NAME, view_of(1, []), fairness=1)


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@given(snapshots(), st.integers(0, 20), st.booleans())
def test_any_memory(view: Snapshot, last: int, holds: bool) -> None:
    """Whatever was remembered, running leases are kept as long as they fit."""
    jobs = np.arange(last)
    until_s = np.full(last, view.now_s + 1 if holds else view.now_s)
    decision = answer(NAME, view, Kept(view.now_s - 1, last, jobs, jobs * 2.0, until_s))
    need = np.where(view.workers > 0, view.workers * view.width + view.fixed_milli, 0)
    if holds and need.sum() <= view.total_milli:
        leased = (view.workers > 0) & (view.job < last)
        assert (decision.workers[leased] >= view.workers[leased]).all()


@settings(max_examples=30)
@given(traces(), st.sampled_from([5.0, 50.0]))
def test_every_trace_ends(trace: Trace, lease_s: float) -> None:
    check_ends(NAME, trace, lease_s=lease_s)


@settings(max_examples=15)
@given(traces())
def test_every_trace_ends_without_known_lengths(trace: Trace) -> None:
    result = run(NAME, trace, "1x8", {"lease_s": 20}, Settings(lengths="unknown"))
    assert np.isfinite(result.finish_s).all()


def test_zero_gpus() -> None:
    assert workers_of(NAME, view_of(0, [job(), job(remaining=0.0)])) == [0, 0]
