"""FfDL: no other hand-out has a larger sum of speed-ups; greedy finds the same on concave curves."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import answer, check_ends, check_uncontended, check_work_conserving
from strategies import job, snapshots, traces, view_of
from stretto.core import handout, knapsack, marginal
from stretto.core.policies import ffdl
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.sim import sample
from stretto.sim.trace import Trace

POLICY = load("ffdl")


def best_sum(view: Snapshot, value: np.ndarray, sure: np.ndarray) -> float:
    """Try every size for every job."""

    @functools.cache
    def best(j: int, free: int) -> float:
        if j == len(view):
            return 0.0
        sums = [] if sure[j] else [best(j + 1, free)]
        for n in range(int(view.min_workers[j]), int(view.max_workers[j]) + 1):
            need = int(n * view.width[j] + view.fixed_milli[j])
            if need <= free:
                sums.append(float(value[j, min(n, value.shape[1] - 1)]) + best(j + 1, free - need))
        return max(sums, default=-np.inf)

    return best(0, view.total_milli)


def total(view: Snapshot, value: np.ndarray, workers: np.ndarray) -> float:
    return float(value[np.arange(len(view)), np.minimum(workers, value.shape[1] - 1)].sum())


@given(snapshots(max_jobs=6))
def test_no_hand_out_has_a_larger_sum(view: Snapshot) -> None:
    value, sure = handout.speedups(view), ffdl.guaranteed(view)
    decision = answer("ffdl", view)
    assert (decision.workers[sure] > 0).all()
    assert total(view, value, decision.workers) >= best_sum(view, value, sure) - 1e-9


@given(snapshots())
def test_nothing_useful_stays_free(view: Snapshot) -> None:
    check_work_conserving("ffdl", view)
    check_uncontended("ffdl", view)


@settings(max_examples=30)
@given(traces())
def test_every_job_ends(trace: Trace) -> None:
    check_ends("ffdl", trace)


@given(
    st.lists(
        st.lists(st.integers(0, 8), min_size=1, max_size=10).map(lambda gains: [8, *sorted(gains, reverse=True)]),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 40),
)
def test_equals_greedy_on_concave_curves(gains: list[list[int]], gpus: int) -> None:
    """Speed-ups of 1, then falling gains in eighths: exact sums, so equal means equal."""
    rates = [np.cumsum([0, *gain]) / 8 for gain in gains]
    view = view_of(gpus, [job(max_workers=len(rate) - 1, rate=rate) for rate in rates])
    value = handout.speedups(view)
    greedy, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    free = handout.give_minimums(view, np.arange(len(view)), greedy, left, view.total_milli)
    marginal.grow(view, value, greedy, free)
    assert total(view, value, POLICY.decide(view, None).workers) == total(view, value, greedy)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("jobs", "gpus"), [(30, 100), (100, 300)])
def test_equals_greedy_on_realistic_jobs(jobs: int, gpus: int, seed: int) -> None:
    view = sample.snapshot(jobs, gpus, seed)
    value = handout.speedups(view)
    assert ffdl.guaranteed(view).all()
    greedy = view.min_workers.copy()
    marginal.grow(view, value, greedy, view.total_milli - int(marginal.smallest_need(view).sum()))
    got = total(view, value, POLICY.decide(view, None).workers)
    assert got == pytest.approx(total(view, value, greedy), rel=1e-12)


def test_a_jump_at_the_end_of_a_plateau_is_found() -> None:
    """Greedy by single workers would give job 1 the second GPU and never see the jump of job 0."""
    view = view_of(5, [job(max_workers=4, rate=[0, 1, 1, 1, 4]), job(max_workers=4, rate=[0, 1, 1.9, 2.7, 3.4])])
    assert POLICY.decide(view, None).workers.tolist() == [4, 1]


def test_the_oldest_jobs_are_guaranteed_their_minimum_and_later_ones_are_not() -> None:
    good, bad = [0, 1, 2, 3, 4], [0, 1, 1.1, 1.2, 1.3]
    view = view_of(3, [job(max_workers=4, rate=rate) for rate in (bad, bad, bad, good)])
    assert POLICY.decide(view, None).workers.tolist() == [1, 1, 1, 0]
    blocked = view_of(3, [job(rate=bad), job(size=3), job(rate=bad), job(max_workers=2, rate=[0, 1, 2.5])])
    assert ffdl.guaranteed(blocked).tolist() == [True, False, False, False]
    assert POLICY.decide(blocked, None).workers.tolist() == [1, 0, 0, 2]


def test_a_job_larger_than_the_cluster_does_not_block_the_others() -> None:
    decision = POLICY.decide(view_of(2, [job(size=3), job(size=1), job(size=1)]), None)
    assert decision.workers.tolist() == [0, 1, 1]
    assert decision.reason[0] == Reason.TOO_LARGE


def test_speed_up_counts_as_linear_up_to_a_minimum_that_hides_it() -> None:
    view = view_of(8, [job(min_workers=4, max_workers=8, rate=[0, 0, 0, 0, 10, 12])])
    assert handout.speedups(view)[0, :6].tolist() == [0, 0, 0, 0, 4, 4.8]


def test_shares_without_a_common_measure_are_still_all_used() -> None:
    view = view_of(100, [job(max_workers=300, width=width) for width in (333, 251, 497)])
    decision = POLICY.decide(view, None)
    held = int((decision.workers * view.width).sum())
    assert 100 * GPU - held < 251
    assert 100 * GPU > knapsack.MOST_CELLS
