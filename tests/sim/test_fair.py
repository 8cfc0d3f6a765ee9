"""The fair world: by hand, and against a fluid simulation in tiny steps."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import trace_of, traces
from stretto.core.snapshot import GPU, FloatArray
from stretto.sim.fair import fair_finish
from stretto.sim.trace import Load, Trace


def by_hand(jobs: list[dict[str, Any]], gpus: int) -> list[float]:
    return fair_finish(trace_of(jobs), gpus * GPU).tolist()


def test_alone_a_job_has_its_maximum() -> None:
    assert by_hand([{"work": 12.0, "max_workers": 4}], 8) == pytest.approx([3])


def test_two_jobs_share_evenly() -> None:
    """4 GPUs: two each until the first ends at 5; the other then has 20 - 10 left for 4."""
    assert by_hand([{"work": 10.0, "max_workers": 8}, {"work": 20.0, "max_workers": 8}], 4) == pytest.approx([5, 7.5])


def test_what_one_cannot_use_goes_to_the_other() -> None:
    """One holds its one GPU, the other three."""
    assert by_hand([{"work": 10.0, "max_workers": 1}, {"work": 30.0, "max_workers": 8}], 4) == pytest.approx([10, 10])


def test_shares_need_not_be_whole() -> None:
    """Three jobs on 4 GPUs hold 4/3 each; on a curve of 0, 3, 4 steps/s that is 3 + 1/3."""
    jobs = [{"work": 10.0, "max_workers": 2, "rate": [0, 3, 4]}] * 3
    assert by_hand(jobs, 4) == pytest.approx([3] * 3)


def test_below_the_minimum_speed_is_linear() -> None:
    """Two jobs that need 4 GPUs each run at half speed on 2 each."""
    jobs = [{"work": 40.0, "min_workers": 4, "max_workers": 4}] * 2
    assert by_hand(jobs, 4) == pytest.approx([20, 20])


def test_shares_are_of_gpus_not_of_workers() -> None:
    """Both hold 2 GPUs: one two workers, the other four."""
    jobs = [{"work": 8.0, "max_workers": 9}, {"work": 8.0, "max_workers": 9, "width": 500}]
    assert by_hand(jobs, 4) == pytest.approx([2 + 4 / 4, 2])


def test_arrivals_share_from_then_on() -> None:
    """Alone for 2 s on 2 GPUs, then one each."""
    jobs = [{"work": 8.0, "max_workers": 2}, {"work": 2.0, "max_workers": 2, "submit_s": 2.0}]
    assert by_hand(jobs, 2) == pytest.approx([5, 4])


def test_a_job_without_work_ends_at_once() -> None:
    assert by_hand([{"work": 0.0, "submit_s": 3.0}, {"work": 4.0}], 1) == pytest.approx([4, 3])


def test_phases() -> None:
    """10 steps at 2/s, then 10 at 1/s on the other curve; beside a job that wants one GPU, on two."""
    trace = trace_of(
        [{"work": 20.0, "rate": [0, 2], "max_workers": 1}, {"work": 6.0, "rate": [0, 1], "max_workers": 1}]
    )
    phases = ((np.array([10.0, 10.0]), np.array([0, 1])), (np.array([6.0]), np.array([1])))
    assert fair_finish(msgspec.structs.replace(trace, phases=phases), 2 * GPU).tolist() == pytest.approx([15, 6])


def test_services_are_elsewhere() -> None:
    trace = trace_of([{"work": 10.0, "max_workers": 2}, {"work": 10.0, "max_workers": 2}])
    load = Load(np.array([0.0]), np.array([2]))
    found = fair_finish(msgspec.structs.replace(trace, services=(None, load)), 2 * GPU)
    assert found[0] == pytest.approx(5)
    assert math.isnan(found[1])


def fluid(trace: Trace, gpus: int, step_s: float) -> FloatArray:
    """The same world in steps: at each, all active jobs raise their shares together until no GPU is left."""
    left, finish = trace.work.copy(), np.full(len(trace), np.nan)
    tick = 0
    while np.isnan(finish).any():
        now = tick * step_s
        active = [j for j in range(len(trace)) if np.isnan(finish[j]) and trace.submit_s[j] <= now]
        share = dict.fromkeys(active, 0.0)
        free, rising = gpus * 1.0, set(active)
        while rising and free > 1e-9:
            room = {j: trace.max_workers[j] * trace.width[j] / GPU - share[j] for j in rising}
            more = min([*room.values(), free / len(rising)])
            for j in rising:
                share[j] += more
            free -= more * len(rising)
            rising = {j for j in rising if room[j] > more + 1e-12}
        for j in active:
            left[j] -= speed(trace, j, share[j] * GPU / trace.width[j]) * step_s
            if left[j] <= 1e-9:
                finish[j] = now + step_s
        tick += 1
    return finish


def speed(trace: Trace, j: int, workers: float) -> float:
    low = int(trace.min_workers[j])
    line = trace.rates[0, trace.curve[j]]
    if workers < low:
        return float(line[min(low, len(line) - 1)] * workers / low)
    return float(np.interp(workers, np.arange(len(line)), line))


@settings(max_examples=25)
@given(trace=traces(max_jobs=5), gpus=st.integers(8, 12))
def test_as_the_fluid_world(trace: Trace, gpus: int) -> None:
    """Each step rounds an end up; what then comes later is late by as much, so errors add up, but stay small."""
    step_s = 0.125
    slow = fluid(trace, gpus, step_s)
    fast = fair_finish(trace, gpus * GPU)
    assert slow == pytest.approx(fast, abs=step_s * (len(trace) + 1) + 1e-6)


@given(trace=traces(), gpus=st.integers(8, 16))
def test_limits(trace: Trace, gpus: int) -> None:
    """Nobody is faster than alone on its best size, nor slower than with a fixed n-th of the cluster."""
    jct = fair_finish(trace, gpus * GPU) - trace.submit_s
    n = len(trace)
    for j in range(n):
        most = float(trace.max_workers[j])
        alone, shared = speed(trace, j, most), speed(trace, j, min(most, gpus * GPU / n / trace.width[j]))
        assert jct[j] >= trace.work[j] / alone - 1e-6
        assert jct[j] <= trace.work[j] / shared + 1e-6
