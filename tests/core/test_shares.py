"""Time shares against grids of all tables there are, and against what is plain by hand."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from stretto.core import shares
from stretto.core.snapshot import FloatArray
from stretto.errors import MissingExtra

STEPS = 8
GRID = np.array(list(itertools.product(np.arange(STEPS + 1) / STEPS, repeat=4))).reshape(-1, 2, 2)
"""Every table of two jobs and two pools in eighths."""

gains = st.lists(st.floats(0.05, 20), min_size=4, max_size=4).map(lambda cells: np.array(cells).reshape(2, 2))
widths = st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=2).map(np.array)
rooms = st.lists(st.sampled_from([1.0, 2.0, 4.0, 8.0]), min_size=2, max_size=2).map(np.array)


def feasible(share: FloatArray, gpus: FloatArray, capacity: FloatArray, slack: float = 1e-7) -> np.ndarray:
    """Which of these tables keep all limits."""
    time = (share.sum(axis=-1) <= 1 + slack).all(axis=-1)
    room = ((share * gpus[:, None]).sum(axis=-2) <= capacity + slack).all(axis=-1)
    return (share >= 0).all(axis=(-1, -2)) & time & room


def worst(gain: FloatArray, share: FloatArray) -> np.ndarray:
    return (gain * share).sum(axis=-1).min(axis=-1)


@given(gain=gains, gpus=widths, capacity=rooms)
def test_fairest_is_as_good_as_every_table_of_a_grid(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> None:
    best = worst(gain, GRID[feasible(GRID, gpus, capacity)]).max()
    share = shares.fairest(gain, gpus, capacity)
    assert feasible(share, gpus, capacity)
    assert worst(gain, share) >= 0.9899 * best


@given(gain=gains, gpus=widths, capacity=rooms)
def test_most_is_as_good_as_every_table_of_a_grid(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> None:
    best = (gain * GRID[feasible(GRID, gpus, capacity)]).sum(axis=(1, 2)).max()
    share = shares.most(gain, gpus, capacity)
    assert feasible(share, gpus, capacity)
    assert (gain * share).sum() >= best * (1 - 1e-6)


tables = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.0, 1e-6, 0.3, 1.0, 7.0, 1e6]), min_size=3 * n, max_size=3 * n),
        st.lists(st.sampled_from([0.001, 0.25, 1.0, 4.0]), min_size=n, max_size=n),
        st.tuples(*(st.sampled_from(rooms) for rooms in ([0.5, 4.0, 100.0], [0.0, 4.0], [0.0, 0.5, 9.0]))),
    )
)


@given(tables)
def test_limits_hold_and_nobody_is_left_out(drawn: tuple[list[float], list[float], tuple[float, ...]]) -> None:
    cells, gpus, capacity = (np.array(part) for part in drawn)
    gain = cells.reshape(-1, 3)
    gain[:, capacity == 0] = 0
    gain[:, 0] += (gain.sum(axis=1) == 0) * 2.0
    share = shares.fairest(gain, gpus, capacity)
    assert feasible(share, gpus, capacity)
    assert (share[gain == 0] == 0).all()
    assert (share.sum(axis=1) > 0).all()
    assert np.array_equal(share, shares.fairest(gain, gpus, capacity))


def test_two_alike_on_one_gpu_get_half_of_it_each() -> None:
    share = shares.fairest(np.ones((2, 1)), np.ones(2), np.ones(1))
    assert share == pytest.approx(np.full((2, 1), 0.5), rel=0.01)
    assert share[0] == share[1]


def test_each_goes_where_its_advantage_is() -> None:
    """Job 0 is four times as fast on pool 0, job 1 equally fast on both: neither has use for the other's pool."""
    gain = np.array([[4.0, 1.0], [3.0, 3.0]])
    share = shares.fairest(gain, np.ones(2), np.ones(2))
    assert (gain * share).sum(axis=1).min() >= 0.99 * 3
    assert share[0, 0] > 0.7
    assert share[1, 1] > 0.7


def test_equal_jobs_and_equal_pools_are_treated_alike() -> None:
    gain = np.repeat([[3.0, 3.0], [1.0, 2.0], [3.0, 3.0]], [4, 3, 2], axis=0)
    share = shares.fairest(gain, np.ones(9), np.array([2.0, 2.0]))
    assert np.unique(share[[0, 1, 2, 3, 7, 8]], axis=0).shape == (1, 2)
    assert np.unique(share[4:7], axis=0).shape == (1, 2)
    alike = shares.fairest(np.ones((5, 2)), np.ones(5), np.array([3.0, 1.0]))
    assert alike[:, 0] == pytest.approx(3 * alike[:, 1], rel=0.3)


@given(gain=gains, gpus=widths, capacity=rooms, away=st.lists(st.floats(-1, 1), min_size=4, max_size=4))
def test_the_centre_is_farther_from_all_limits_than_its_neighbours(
    gain: FloatArray, gpus: FloatArray, capacity: FloatArray, away: list[float]
) -> None:
    share = shares.fairest(gain, gpus, capacity)
    floor = 0.99 * largest(gain, gpus, capacity)

    def height(table: FloatArray) -> float:
        limits = (table, 1 - table.sum(axis=1), capacity - gpus @ table, (gain * table).sum(axis=1) / floor - 1)
        distances = np.concatenate([limit.ravel() for limit in limits])
        return float(np.log(distances).sum()) if (distances > 0).all() else -np.inf

    assert height(share) > -np.inf
    for size in (0.1, 0.01, 0.001):
        assert height(share) >= height(share + size * np.array(away).reshape(2, 2)) - 1e-4


def largest(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> float:
    """The optimum of two jobs on two pools, written out: unknowns are the four shares and the level."""
    (a, b), (c, d) = gain
    g, h = gpus
    rows = [[-a, -b, 0, 0, 1], [0, 0, -c, -d, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [g, 0, h, 0, 0], [0, g, 0, h, 0]]
    return -float(linprog([0, 0, 0, 0, -1], A_ub=rows, b_ub=[0, 0, 1, 1, *capacity]).fun)


def test_in_order_gives_the_fastest_pool_with_room_and_stops_at_the_first_without() -> None:
    gain = np.array([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [1.0, 1.0]])
    share = shares.in_order(gain, np.array([2.0, 1.0, 4.0, 1.0]), np.array([2.0, 2.0]))
    assert share.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtra, match=r"stretto\[solver\]"):
        shares.fairest(np.ones((1, 1)), np.ones(1), np.ones(1))
