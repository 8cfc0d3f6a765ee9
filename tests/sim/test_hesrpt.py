"""Elastic policies against the known optimum: all jobs at time 0, every speed-up n^p.

heSRPT (Berg, Vesilo, Harchol-Balter 2020) is optimal for the mean completion time there, with shares that need
not be whole. A policy hands out whole GPUs, so it can come close on a large cluster but can never be better.
AFS-L weighs two jobs with equal curves nearly alike; its distance is therefore that of an equal split, which grows
with p: at most 2 % at p = 0.3, 7 % at 0.5 and 32 % at 0.8. Our own policy stays within 2, 3 and 12 %.
"""

from __future__ import annotations

import numpy as np
import pytest

from stretto.core.policy import load
from stretto.core.snapshot import FloatArray
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace

NODES, DEVICES = 128, 8
GPUS = NODES * DEVICES
POWERS = (0.3, 0.5, 0.8)
RATIO = {"afs-l": (1.02, 1.07, 1.32), "stretto": (1.02, 1.03, 1.12)}
WORKLOADS = {
    "heavy-tailed": np.random.default_rng(0).lognormal(8.0, 1.5, 12),
    "exponential": np.random.default_rng(1).exponential(5000.0, 12) + 1,
    "equal": np.full(12, 5000.0),
    "two": np.array([9000.0, 2000.0]),
}


def optimum_s(work: FloatArray, p: float) -> float:
    """The smallest possible sum of completion times."""
    k = np.arange(1, len(work) + 1)
    weight = (k ** (1 / (1 - p)) - (k - 1) ** (1 / (1 - p))) ** (1 - p)
    return float((np.sort(work)[::-1] * weight).sum() / GPUS**p)


def hesrpt_s(work: FloatArray, p: float) -> float:
    """The same by running the policy: with m jobs left the i-th largest has this fraction of the cluster."""
    left, now_s, total_s = np.sort(work)[::-1], 0.0, 0.0
    for m in range(len(work), 0, -1):
        edge = (np.arange(m + 1) / m) ** (1 / (1 - p))
        speed = (np.diff(edge) * GPUS) ** p
        step_s = left[m - 1] / speed[m - 1]
        left = (left - speed * step_s)[: m - 1]
        now_s += step_s
        total_s += now_s
    return total_s


def trace_of_powers(work: FloatArray, p: float) -> Trace:
    n = len(work)
    return Trace.build(
        "powers",
        [str(i) for i in range(n)],
        [0.0] * n,
        [1] * n,
        work.tolist(),
        work=work.tolist(),
        curve=[0] * n,
        rates=(np.arange(GPUS + 1) ** p)[None, None],
        min_workers=[1] * n,
        max_workers=[GPUS] * n,
    )


def ratio(policy: str, workload: str, p: float) -> float:
    work = WORKLOADS[workload]
    result = simulate(trace_of_powers(work, p), *cluster.uniform(NODES, DEVICES), load(policy))
    return float(result.finish_s.sum()) / optimum_s(work, p)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_closed_form_is_what_hesrpt_reaches(workload: str, p: float) -> None:
    assert hesrpt_s(WORKLOADS[workload], p) == pytest.approx(optimum_s(WORKLOADS[workload], p), rel=1e-9)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", ["optimus", "ffdl"])
def test_the_optimum_is_never_beaten(policy: str, workload: str, p: float) -> None:
    assert ratio(policy, workload, p) >= 1 - 1e-9


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", RATIO)
def test_the_best_stay_close_to_it_and_never_beat_it(policy: str, workload: str, p: float) -> None:
    assert 1 - 1e-9 <= ratio(policy, workload, p) <= RATIO[policy][POWERS.index(p)]
