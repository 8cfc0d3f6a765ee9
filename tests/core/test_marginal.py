"""Greedy growth against every possible growth, and the reasons."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core import marginal
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


def best_sum(value: np.ndarray, low: list[int], high: list[int], extra: int) -> float:
    """The largest sum of values over all ways to add at most `extra` workers."""
    ranges = [range(a, b + 1) for a, b in zip(low, high, strict=True)]
    fits = (n for n in itertools.product(*ranges) if sum(n) - sum(low) <= extra)
    return max(sum(value[j, k] for j, k in enumerate(n)) for n in fits)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4),
    st.integers(0, 12),
)
def test_growth_is_optimal_on_concave_rows(jobs: list[tuple[int, list[int]]], extra: int) -> None:
    rows = [np.cumsum([0] * low + sorted(gains, reverse=True) + [0]) for low, gains in jobs]
    low, high = [low for low, _ in jobs], [low + len(gains) for low, gains in jobs]
    view = view_of(
        sum(low) + extra,
        [job(min_workers=a, max_workers=b, rate=row) for a, b, row in zip(low, high, rows, strict=True)],
    )
    value = marginal.speeds(view)
    workers = np.array(low, np.int64)
    marginal.grow(view, value, workers, extra * GPU)
    got = sum(value[j, n] for j, n in enumerate(workers.tolist()))
    assert got == best_sum(value, low, high, extra)
    assert workers.sum() - sum(low) <= extra


def test_growth_steps_over_a_plateau_that_pays() -> None:
    view = view_of(8, [job(max_workers=8, rate=[0, 1, 1, 1, 4]), job(max_workers=2, rate=[0, 1, 1.5])])
    workers = np.array([1, 1], np.int64)
    last, free = marginal.grow(view, marginal.speeds(view), workers, 3 * GPU)
    assert workers.tolist() == [4, 1]
    assert last.tolist() == [1.0, 0.0]
    assert free == 0


def test_growth_takes_a_shorter_step_where_the_long_one_does_not_fit() -> None:
    view = view_of(8, [job(max_workers=8, rate=[0, 1, 1.1, 1.2, 9])])
    workers = np.array([1], np.int64)
    assert marginal.grow(view, marginal.speeds(view), workers, 2 * GPU)[1] == 0
    assert workers.tolist() == [3]


def test_growth_counts_gain_per_gpu_not_per_worker() -> None:
    wide = job(max_workers=2, width=2 * GPU, rate=[0, 1, 2.5])
    narrow = job(max_workers=2, width=GPU, rate=[0, 1, 2])
    view = view_of(8, [wide, narrow])
    workers = np.array([1, 1], np.int64)
    marginal.grow(view, marginal.speeds(view), workers, 2 * GPU)
    assert workers.tolist() == [1, 2]


def test_unknown_lengths_count_as_what_is_done_or_a_minute() -> None:
    jobs = [
        job(remaining=7.0, done=99.0),
        job(remaining=math.nan, done=500.0),
        job(remaining=math.nan, rate=[0, 2]),
        job(remaining=0.0, done=99.0),
    ]
    assert marginal.lengths(view_of(4, jobs)).tolist() == [7.0, 500.0, 120.0, 1e-9]


@given(snapshots())
def test_speeds_are_the_snapshots(view: Snapshot) -> None:
    table = marginal.speeds(view)
    for n in range(table.shape[1]):
        assert np.array_equal(table[:, n], view.rate(np.full(len(view), n)))


def test_every_outcome_has_its_reason_and_numbers() -> None:
    def one(low: int, high: int, before: int) -> dict[str, object]:
        return job(min_workers=low, max_workers=high, workers=before)

    view = view_of(
        6,
        [
            one(1, 4, 2),
            one(1, 4, 3),
            one(1, 9, 1),
            one(1, 1, 1),
            one(1, 4, 0),
            one(2, 4, 0),
            one(2, 4, 2),
            one(9, 9, 0),
        ],
    )
    workers = np.array([3, 1, 1, 1, 1, 0, 0, 0], np.int64)
    left = np.full(8, GPU, np.float64)
    last = np.array([0.5, 0, 0.25, 0, 0, 0, 0, 0.0])
    ahead = np.array([0.4, 0.2, 0.1, 0, 0.3, 0, 0, 0])
    told = marginal.decision(view, workers, left, last, ahead)
    assert told.reason.tolist() == [
        Reason.GROWN, Reason.SHRUNK, Reason.LITTLE_GAIN, Reason.AT_MAXIMUM,
        Reason.RUNS, Reason.NO_ROOM, Reason.PREEMPTED, Reason.TOO_LARGE,
    ]  # fmt: skip
    assert told.detail.tolist() == [
        [0.5, 0.25], [1, 0.25], [0.1, 0.25], [1, 0], [1, 1], [2, 1], [2, 1], [9, 6]
    ]  # fmt: skip
