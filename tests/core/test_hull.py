"""Concave hulls: by hand, and against the definition (the least concave curve above), tried point by point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.hull import hulls

rows = st.integers(1, 12).flatmap(
    lambda size: st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 1.0, 7.0]), min_size=size, max_size=size),
        min_size=1,
        max_size=4,
    )
)
"""Gains per worker of a few curves of one length."""


def vertices(*rates: float) -> list[tuple[int, float]]:
    hull = hulls(np.array([rates]))
    return list(zip(hull.workers[0].tolist(), hull.rate[0].tolist(), strict=True))


def test_a_straight_line_is_one_stretch() -> None:
    assert vertices(0, 1, 2, 3) == [(0, 0), (3, 3)]


def test_a_concave_curve_keeps_its_corners() -> None:
    assert vertices(0, 4, 6, 7) == [(0, 0), (1, 4), (2, 6), (3, 7)]


def test_dents_are_bridged() -> None:
    """At 3 workers the line from 0 has the same slope as at 1: one stretch over both."""
    assert vertices(0, 1, 1.5, 3, 3.2) == [(0, 0), (3, 3), (4, 3.2)]


def test_nothing_below_a_smallest_size() -> None:
    assert vertices(0, 0, 0, 6, 7) == [(0, 0), (3, 6), (4, 7)]


def test_it_ends_where_more_workers_add_nothing() -> None:
    assert vertices(0, 2, 3, 3, 3) == [(0, 0), (1, 2), (2, 3)]


@pytest.mark.parametrize("rates", [(0,), (0, 0, 0)])
def test_no_speed_at_all(rates: tuple[float, ...]) -> None:
    hull = hulls(np.array([rates], np.float64))
    assert hull.workers.tolist() == [[0, 0]]
    assert hull.slope.tolist() == [[0.0]]


def test_short_rows_repeat_their_last_vertex() -> None:
    hull = hulls(np.array([[0.0, 1.0, 2.0, 3.0], [0.0, 4.0, 6.0, 7.0]]))
    assert hull.workers.tolist() == [[0, 3, 3, 3], [0, 1, 2, 3]]
    assert hull.slope.tolist() == [[1, 0, 0], [4, 2, 1]]


def majorant(curve: Any) -> list[float]:
    """The best mix of two sizes with that many workers on average."""
    n = len(curve)
    best = []
    for at in range(n):
        mixes = [
            curve[i] + (curve[j] - curve[i]) * (at - i) / (j - i) if j > i else curve[i]
            for i in range(at + 1)
            for j in range(at, n)
        ]
        best.append(max(mixes))
    return best


@given(gains=rows)
def test_the_least_concave_curve_above(gains: list[list[float]]) -> None:
    rates = np.concatenate((np.zeros((len(gains), 1)), np.cumsum(gains, axis=1)), axis=1)
    found = hulls(rates)
    for row, workers, rate, slope in zip(rates, found.workers, found.rate, found.slope, strict=True):
        assert rate.tolist() == row[workers].tolist(), "vertices lie on the curve"
        assert np.interp(np.arange(len(row)), workers, rate) == pytest.approx(majorant(row.tolist()))
        real = np.diff(workers) > 0
        assert (np.diff(slope[real]) < 0).all(), "gains fall from stretch to stretch"
        assert (slope[~real] == 0).all()
        assert workers[-1] == int(np.argmax(row)), "the smallest size with the highest speed"
