"""The least makespan on a cluster of several device types.

If every job could be cut into time slices at will, y seconds on each of its ways to run (a device type and a
number of workers), the end M of all work would be the optimum of a linear programme:

    minimise M   with, for each job,         sum of rate × y over its ways ≥ its work,
                                             sum of y over its ways ≤ M,
                 and, for each device type,  sum of GPUs × y over the ways on it ≤ its GPUs × M.

Real schedules obey all of it, so none ends sooner. Work that arrives later cannot start sooner either: the same
programme for the jobs submitted from t on, started at t, is a bound too; the largest counts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, FloatArray, IntArray, Nodes
from stretto.errors import MissingExtra
from stretto.sim import cluster as clusters
from stretto.sim.trace import Trace

_MOMENTS = 8


def makespan(trace: Trace, pools: tuple[str, ...], nodes: Nodes) -> float:
    """Seconds from the first submission that no schedule of the trace on these nodes can beat."""
    ways = _ways(trace, pools)
    gpus = clusters.capacity(pools, nodes) / GPU
    submits = np.unique(trace.submit_s)
    moments = submits[np.unique(np.linspace(0, len(submits) - 1, _MOMENTS).astype(np.int64))]
    return max(float(t) + _least(trace.work, gpus, _from(ways, trace.submit_s >= t)) for t in moments)


class _Ways(msgspec.Struct, frozen=True):
    """Each way to run: whose it is, where, what it takes and what it gives."""

    job: IntArray
    pool: IntArray
    gpus: FloatArray
    rate: FloatArray


def _ways(trace: Trace, pools: tuple[str, ...]) -> _Ways:
    rates = trace.rates[[trace.pools.index(pool) for pool in pools]] if len(trace.pools) > 1 else trace.rates
    rows = []
    for j in range(len(trace)):
        curves = trace.phases[j][1] if trace.phases else trace.curve[j : j + 1]
        for n in range(int(trace.min_workers[j]), int(trace.max_workers[j]) + 1):
            best = rates[:, curves, min(n, rates.shape[2] - 1)].max(axis=1)
            rows += [(j, p, n * trace.width[j] / GPU, best[min(p, len(best) - 1)]) for p in range(len(pools))]
    job, pool, gpus, rate = (np.array(column) for column in zip(*rows, strict=True))
    useful = rate > 0
    return _Ways(job[useful], pool[useful], gpus[useful], rate[useful])


def _from(ways: _Ways, jobs: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> _Ways:
    keep = jobs[ways.job]
    return _Ways(ways.job[keep], ways.pool[keep], ways.gpus[keep], ways.rate[keep])


def _least(work: FloatArray, gpus: FloatArray, ways: _Ways) -> float:
    try:
        from scipy import sparse
        from scipy.optimize import linprog
    except ImportError:
        raise MissingExtra("the makespan bound solves a linear programme", hint="pip install stretto[solver]") from None
    jobs, row = np.unique(ways.job, return_inverse=True)
    n, m, p = len(jobs), len(row), len(gpus)
    # In units of each job's least time, and of their sum, all numbers are of order one.
    best = np.zeros(n)
    np.maximum.at(best, row, ways.rate)
    unit = float((work[jobs] / best).max()) or 1.0
    column = np.arange(m)
    done = sparse.coo_array((-ways.rate / best[row], (row, column)), shape=(n, m))
    spent = sparse.coo_array((np.ones(m), (row, column)), shape=(n, m))
    used = sparse.coo_array((ways.gpus, (ways.pool, column)), shape=(p, m))
    ends = sparse.coo_array(np.concatenate((np.zeros(n), -np.ones(n), -gpus))[:, None])
    rows = sparse.hstack((sparse.vstack((done, spent, used)), ends), format="csr")
    limit = np.concatenate((-work[jobs] / best / unit, np.zeros(n + p)))
    cost = np.append(np.zeros(m), 1.0)
    answer = linprog(cost, A_ub=rows, b_ub=limit)  # type: ignore[call-overload]  # the stubs know dense only
    return float(answer.fun) * unit
