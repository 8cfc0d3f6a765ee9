"""The Gittins index against its definition, and the original's table against its text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_checks import workers_of
from strategies import job, view_of
from stretto.core.policies._gittins_sample import GPU_S
from stretto.core.policies.tiresias_gittins import gittins_index, original_index
from stretto.core.policy import load
from stretto.errors import UsageError

SIZES = st.lists(st.integers(1, 60).map(float), min_size=1, max_size=12)


def by_definition(sample: list[float], served: float, quantum: float) -> float:
    alive = [size for size in sample if size > served]
    if not alive:
        return 0.0
    ends = sum(size - served <= quantum for size in alive)
    takes = sum(min(size - served, quantum) for size in alive)
    return ends / takes


@given(sample=SIZES, served=st.integers(0, 70), quantum=st.integers(1, 80))
def test_index_is_chance_over_expected_service(sample: list[float], served: int, quantum: int) -> None:
    index = gittins_index(tuple(sorted(sample)), (float(quantum), math.inf))
    assert index(float(served), 0) == pytest.approx(by_definition(sample, served, quantum))
    assert index(float(served), 1) == pytest.approx(by_definition(sample, served, math.inf))


@given(served=st.integers(0, 60_000_000))
def test_original_table_by_its_text(served: int) -> None:
    """Just below the next larger size v: a = v - 1, quantum 3250, sizes whole, division without remainder."""
    larger = [size for size in GPU_S if size > served]
    if not larger:
        assert original_index(GPU_S, 3250.0)(float(served), 0) == 0
        return
    a = larger[0] - 1
    alive = [size for size in GPU_S if size > a]
    within = [size for size in alive if size <= a + 3250]
    if a + 3250 > GPU_S[-1] - 1:
        within = alive[:-1]
    expected = int(sum(within) + 3250 * (len(alive) - len(within))) // len(alive)
    index = 1e6 * len(within) / len(alive) / expected
    found = original_index(GPU_S, 3250.0)(float(served), 0)
    assert found == pytest.approx(index, abs=1e6 * 0.6e-5 / expected + 0.6e-4)


def test_halves_round_away_from_zero_as_in_the_authors_python() -> None:
    sample = tuple(float(v) for v in range(1, 65))  # 1 of 64 jobs ends within one: 0.015625 -> 0.01563.
    assert original_index(sample, 1.0)(0.0, 0) == 15630.0


def test_the_sample_is_sorted_and_whole() -> None:
    assert len(GPU_S) == 1001
    assert list(GPU_S) == sorted(GPU_S)
    assert GPU_S[0] == 121
    assert GPU_S[-1] == 53294624


def test_the_nearly_done_kind_goes_first() -> None:
    """Jobs that get past 1 mostly take 100, but those past 99 end at once."""
    options = {"sample": (1.0, 100.0, 100.0, 100.0), "queues": (1000.0,), "quantum": 10.0}
    jobs = [job(size=1, gpu_s=50.0, ran_s=50.0), job(size=1, gpu_s=99.0, ran_s=99.0), job(size=1)]
    assert workers_of("tiresias-gittins", view_of(1, jobs, now_s=100.0), **options) == [0, 1, 0]
    assert workers_of("tiresias-gittins", view_of(2, jobs, now_s=100.0), **options) == [0, 1, 1]


@pytest.mark.parametrize("setting", ["promote", "quantum", "sample"])
def test_nonsense_is_refused(setting: str) -> None:
    with pytest.raises(UsageError):
        load("tiresias-gittins", {setting: "-1"})
