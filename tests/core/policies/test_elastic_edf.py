"""The most urgent job runs as wide as it may, however little that helps it."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given

from policy_checks import answer
from strategies import job, snapshots, view_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot


def test_in_order_of_deadline_each_as_wide_as_fits() -> None:
    jobs = [
        job(max_workers=8, deadline_s=300.0),
        job(max_workers=4, deadline_s=100.0, rate=[0, 9, 8, 7, 6]),
        job(max_workers=64, deadline_s=200.0),
        job(max_workers=2, deadline_s=math.inf),
    ]
    decision = answer("elastic-edf", view_of(11, jobs))
    # 4 of 11 although one would be faster, then 4 of the 7 left (the next level is 8), 2 of 3, and 1.
    assert decision.workers.tolist() == [2, 4, 4, 1]
    assert decision.detail[:, 1].tolist() == [3, 11, 7, 1]


def test_past_its_deadline_a_job_still_goes_first() -> None:
    jobs = [job(size=2, deadline_s=1e9, workers=2), job(size=2, deadline_s=5.0)]
    decision = answer("elastic-edf", view_of(3, jobs, now_s=100.0))
    assert decision.workers.tolist() == [0, 2]
    assert decision.reason.tolist() == [Reason.PREEMPTED, Reason.RUNS]


@given(snapshots())
def test_as_a_plain_walk_over_all_levels(view: Snapshot) -> None:
    decision = answer("elastic-edf", view)
    free = view.total_milli
    for j in sorted(range(len(view)), key=lambda j: (view.deadline_s[j], view.job[j])):
        low, high = int(view.min_workers[j]), int(view.max_workers[j])
        levels = {low, high, *(n for n in (1, 2, 4, 8, 16, 32, 64) if low < n < high)}
        fitting = [n for n in levels if n * view.width[j] + view.fixed_milli[j] <= free]
        assert decision.workers[j] == max(fitting, default=0)
        free -= int(decision.workers[j] * view.width[j] + view.fixed_milli[j] * (decision.workers[j] > 0))


@given(snapshots())
def test_only_more_urgent_jobs_stop_a_running_one(view: Snapshot) -> None:
    decision = answer("elastic-edf", view)
    taken = np.where(decision.workers > 0, decision.workers * view.width + view.fixed_milli, 0)
    for j in np.flatnonzero((view.workers > 0) & (decision.workers == 0)).tolist():
        ahead = (view.deadline_s < view.deadline_s[j]) | (
            (view.deadline_s == view.deadline_s[j]) & (view.job < view.job[j])
        )
        left = view.total_milli - int(taken[ahead].sum())
        assert view.min_workers[j] * view.width[j] + view.fixed_milli[j] > left
