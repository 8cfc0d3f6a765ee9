"""The time-priced dual bound: below every schedule, and close to the best of them where that is known."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import run
from schedules import best, tiny
from strategies import trace_of, traces
from stretto.core.snapshot import GPU
from stretto.errors import UsageError
from stretto.sim import bounds, dual_bound
from stretto.sim.trace import Load, Trace


def elastic(jobs: int, seed: int, power: float = 0.3, gpus: int = 16) -> Trace:
    """A typical workload: heavy-tailed sizes, Poisson arrivals at a load above 1 for a while, speed-up n^p."""
    random = np.random.default_rng(seed)
    rate = np.arange(gpus + 1.0) ** power
    work = random.lognormal(6.0, 1.2, jobs)
    submit = np.cumsum(random.exponential(float(work.mean()) / gpus, jobs))
    return trace_of(
        [
            {"work": w, "submit_s": s, "rate": rate, "max_workers": gpus, "requested": 1}
            for w, s in zip(work.tolist(), submit.tolist(), strict=True)
        ]
    )


@settings(max_examples=40)
@given(trace=tiny(), gpus=st.integers(3, 4), bin_s=st.sampled_from([0.25, 1.0, 5.0]))
def test_below_the_best_of_all_schedules(trace: Trace, gpus: int, bin_s: float) -> None:
    assert dual_bound.average_jct(trace, gpus, bin_s=bin_s, rounds=8) <= best(trace, gpus)[0] + 1e-9


def test_a_curve_counts_up_to_the_maximum_only() -> None:
    """Beyond 3 workers the first job would be fast; up to 3 it does 2 steps/s. Both run alone: 50 s and 150 s."""
    trace = trace_of(
        [
            {"work": 100.0, "rate": [0, 1, 1.5, 2, 3.9], "max_workers": 3},
            {"work": 150.0, "rate": [0, 1], "max_workers": 1},
        ]
    )
    assert dual_bound.average_jct(trace, 4, bin_s=1.0) <= 100.0


@settings(max_examples=12)
@given(trace=traces(max_jobs=6), bin_s=st.sampled_from([2.0, 20.0]))
def test_below_what_policies_reach(trace: Trace, bin_s: float) -> None:
    whole = msgspec.structs.replace(trace, width=np.full(len(trace), GPU), max_workers=np.maximum(trace.min_workers, 8))
    limit = dual_bound.average_jct(whole, 16, bin_s=bin_s, rounds=10)
    for name in ("afs-l", "stretto", "elastic-srtf"):
        jct = run(name, whole, "2x8").finish_s - whole.submit_s
        assert limit <= float(jct.mean()) + 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_tighter_than_the_plain_bounds_on_a_typical_workload(seed: int) -> None:
    """And policies come close to it."""
    trace = elastic(40, seed)
    limit = dual_bound.average_jct(trace, 16, bin_s=60.0)
    assert limit >= bounds.average_jct(bounds.sizes(trace), 16)
    for name in ("afs-l", "stretto"):
        mean_s = float((run(name, trace, "2x8").finish_s - trace.submit_s).mean())
        assert limit <= mean_s <= 1.2 * limit


@pytest.mark.parametrize(("power", "share"), [(0.3, 0.75), (0.5, 0.5), (0.8, 0.45)])
def test_below_the_known_optimum(power: float, share: float) -> None:
    """All jobs at 0 and speed-up n^p: heSRPT's optimum is known. With so few jobs prices are hard to find."""
    gpus, work = 64, np.array([4000.0, 2500.0, 1500.0, 900.0, 500.0])
    rate = np.arange(gpus + 1.0) ** power
    trace = trace_of([{"work": w, "rate": rate, "max_workers": gpus, "requested": 1} for w in work.tolist()])
    k = np.arange(1, len(work) + 1)
    weight = (k ** (1 / (1 - power)) - (k - 1) ** (1 / (1 - power))) ** (1 - power)
    optimum = float((work * weight).sum() / gpus**power / len(work))
    # Between whole numbers of GPUs the hull lies a hair below n^p, so the optimum on whole GPUs is a hair larger.
    assert share * optimum <= dual_bound.average_jct(trace, gpus, bin_s=optimum / 100, rounds=20) <= 1.002 * optimum


def test_a_job_alone() -> None:
    """Nobody is in its way: the price is nothing, the bound nearly its shortest time."""
    trace = trace_of([{"work": 1000.0, "max_workers": 4}])
    assert 245 <= dual_bound.average_jct(trace, 8, bin_s=1.0, rounds=60) <= 250


def test_nothing_to_say_when_jobs_were_turned_away() -> None:
    assert math.isnan(dual_bound.average_jct(elastic(3, 0), 16, np.array([True, False, True])))


def odd(**columns: Any) -> Trace:
    return msgspec.structs.replace(elastic(2, 0), **columns)


@pytest.mark.parametrize(
    "trace",
    [
        odd(width=np.array([GPU, 500])),
        odd(services=(None, Load(np.array([0.0]), np.array([1])))),
        odd(pools=("a", "b"), rates=np.ones((2, 2, 17))),
        odd(phases=((np.array([1.0]), np.array([0])),) * 2),
    ],
)
def test_says_what_it_cannot_bound(trace: Trace) -> None:
    with pytest.raises(UsageError, match="dual bound"):
        dual_bound.average_jct(trace, 16)
