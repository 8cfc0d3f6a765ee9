"""The largest assignment, against all permutations and against scipy."""

from __future__ import annotations

import sys
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.placement.assignment import largest, match


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_no_permutation_is_larger(rows: list[list[int]]) -> None:
    values = np.array(rows, np.float64)
    every = range(len(values))
    best = max(sum(values[row, order[row]] for row in every) for order in permutations(every))
    for columns in (match(values), largest(values)):
        assert sorted(columns.tolist()) == list(every)
        assert values[every, columns].sum() == best


def test_ours_and_scipys_agree_on_a_large_one() -> None:
    values = np.random.default_rng(3).integers(0, 5, (120, 120)).astype(np.float64)
    every = np.arange(120)
    assert values[every, match(values)].sum() == values[every, largest(values)].sum()


def test_without_scipy_ours_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert largest(np.array([[0.0, 2.0], [1.0, 4.0]])).tolist() == [0, 1]


def test_nothing_to_match() -> None:
    assert len(match(np.empty((0, 0)))) == 0
