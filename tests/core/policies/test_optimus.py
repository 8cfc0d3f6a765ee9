"""Optimus: minimums in order, then always the largest saving of remaining time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from policy_checks import answer, check_ends, check_order, check_uncontended, check_work_conserving
from strategies import job, snapshots, traces, view_of
from stretto.core.policies.optimus import seconds_left
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim import sample
from stretto.sim.trace import Trace

POLICY = load("optimus")


def slow(view: Snapshot) -> list[int]:
    """Look at every job and every step before each grant."""
    workers, free, left_s = [0] * len(view), view.total_milli, seconds_left(view)
    for j in range(len(view)):
        need = int(view.min_workers[j] * view.width[j] + view.fixed_milli[j])
        if need <= free:
            workers[j], free = int(view.min_workers[j]), free - need
    while True:
        best, gain = None, 0.0
        for j, n in enumerate(workers):
            width = int(view.width[j])
            for more in range(n + 1, min(int(view.max_workers[j]), left_s.shape[1] - 1) + 1):
                saved_per_gpu = (-left_s[j, more] + left_s[j, n]) / (more - n) * GPU / width
                if n and (more - n) * width <= free and saved_per_gpu > gain:
                    best, gain = (j, more), saved_per_gpu
        if best is None:
            return workers
        j, more = best
        free -= (more - workers[j]) * int(view.width[j])
        workers[j] = more


@given(snapshots(max_jobs=8))
def test_equals_the_definition(view: Snapshot) -> None:
    assert answer("optimus", view).workers.tolist() == slow(view)


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition_on_realistic_jobs(seed: int) -> None:
    view = sample.snapshot(12, 40, seed)
    assert POLICY.decide(view, None).workers.tolist() == slow(view)


@given(snapshots())
def test_nothing_useful_stays_free(view: Snapshot) -> None:
    check_work_conserving("optimus", view)
    check_uncontended("optimus", view)


@given(snapshots())
def test_only_older_jobs_take_a_jobs_minimum(view: Snapshot) -> None:
    check_order("optimus", view, np.arange(len(view)))


@settings(max_examples=30)
@given(traces())
def test_every_job_ends(trace: Trace) -> None:
    check_ends("optimus", trace)
    check_ends("optimus", trace, round_s=60)


def test_by_hand() -> None:
    """The long job saves 450 s by its second worker and 150 s by its third, the short one 40 s by its second."""
    view = view_of(4, [job(max_workers=4, remaining=900), job(max_workers=4, rate=[0, 1, 5 / 3, 2], remaining=100)])
    decision = POLICY.decide(view, None)
    assert decision.workers.tolist() == [3, 1]


def test_a_plateau_is_stepped_over_when_that_pays() -> None:
    view = view_of(
        4,
        [job(max_workers=4, rate=[0, 1, 1, 4], remaining=100), job(max_workers=4, rate=[0, 1, 1.2], remaining=100)],
    )
    assert POLICY.decide(view, None).workers.tolist() == [3, 1]
    published = load("optimus", {"look_ahead": False})
    assert published.decide(view, None).workers.tolist() == [1, 2]


def test_older_jobs_keep_their_minimum_before_younger_ones() -> None:
    view = view_of(2, [job(size=1), job(size=2), job(size=1), job(size=1, workers=1)])
    decision = POLICY.decide(view, None)
    assert decision.workers.tolist() == [1, 0, 1, 0]
    assert decision.reason.tolist() == [Reason.RUNS, Reason.NO_ROOM, Reason.RUNS, Reason.PREEMPTED]


def test_rounds_leave_everything_as_it_is_in_between() -> None:
    rounds = load("optimus", {"round_s": "60"})
    first = rounds.decide(view_of(4, [job(max_workers=4)], now_s=30.0), None)
    assert (first.workers.tolist(), first.wake_s) == ([4], 60.0)
    arrival = view_of(4, [job(max_workers=4, workers=4), job(max_workers=4, submit_s=40.0)], now_s=40.0)
    between = rounds.decide(arrival, first.memory)
    assert (between.workers.tolist(), between.wake_s) == ([4, 0], 60.0)
    assert between.reason.tolist() == [Reason.WAITS_FOR_ROUND] * 2
    later = view_of(4, [job(max_workers=4, workers=4), job(max_workers=4)], now_s=60.0)
    after = rounds.decide(later, between.memory)
    assert (after.workers.tolist(), after.wake_s) == ([2, 2], 120.0)
    assert POLICY.decide(later, None).wake_s == math.inf


def test_a_negative_round_is_refused() -> None:
    with pytest.raises(UsageError, match="round_s"):
        load("optimus", {"round_s": -1})
