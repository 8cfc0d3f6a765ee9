"""The dynamic programme against every combination of choices."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.core import knapsack

NO = -np.inf

choices = st.lists(
    st.lists(st.tuples(st.one_of(st.just(NO), st.integers(-3, 9).map(float)), st.integers(0, 9)), max_size=4),
    max_size=5,
)


def table(jobs: list[list[tuple[float, int]]], unit: int) -> tuple[np.ndarray, np.ndarray]:
    most = max((len(job) for job in jobs), default=0)
    padded = [[(0.0, 0), *job, *[(NO, 0)] * (most - len(job))] for job in jobs]
    value = np.array([[v for v, _ in job] for job in padded]).reshape(len(jobs), most + 1)
    cost = np.array([[c * unit for _, c in job] for job in padded], np.int64).reshape(len(jobs), most + 1)
    return value, cost


@given(choices, st.integers(0, 20), st.sampled_from([1, 250, 1000]))
def test_no_combination_is_better(jobs: list[list[tuple[float, int]]], room: int, unit: int) -> None:
    value, cost = table(jobs, unit)
    rows = np.arange(len(jobs))
    chosen = knapsack.choose(value, cost, room * unit)
    assert cost[rows, chosen].sum() <= room * unit
    best = max(
        sum(value[j, c] for j, c in enumerate(pick))
        for pick in itertools.product(*(range(value.shape[1]) for _ in jobs))
        if sum(cost[j, c] for j, c in enumerate(pick)) <= room * unit
    )
    assert value[rows, chosen].sum() == best


@given(choices, st.integers(0, 20))
def test_rounded_cells_never_overcommit(jobs: list[list[tuple[float, int]]], room: int) -> None:
    value, cost = table(jobs, 1_000_003)
    cost += cost > 0  # no common measure, so cells are rounded
    capacity = room * 1_000_003 + 17
    chosen = knapsack.choose(value, cost, capacity)
    rows = np.arange(len(jobs))
    assert cost[rows, chosen].sum() <= capacity
    assert (value[rows, chosen] > NO).all()


def test_equal_sums_go_to_the_smaller_choice() -> None:
    value = np.array([[0.0, 5.0, 5.0], [0.0, 5.0, 5.0]])
    cost = np.array([[0, 1, 2], [0, 1, 2]])
    assert knapsack.choose(value, cost, 4).tolist() == [1, 1]
