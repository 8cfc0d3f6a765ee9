"""Lower bounds: no schedule of the trace on so many GPUs can do better.

With a = the fewest GPU-seconds a job can be done with, and p = the least time it can take:
makespan   ≥ the longest of (submit + p), and of t + (all a submitted from t on) / G
mean time  ≥ mean p
           ≥ shortest-remaining-first of sizes a/G on one machine
           ≥ mean of (mean busy time + p/2 − submit), for sizes a/G on one machine, smallest a first
The time-priced dual bound for elastic jobs, much tighter and slower to compute, is in `dual_bound`.
"""

from __future__ import annotations

import heapq
import math

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, BoolArray, FloatArray
from stretto.sim.trace import Trace


class Sizes(msgspec.Struct, frozen=True):
    """What the bounds need of each job."""

    submit_s: FloatArray
    area_gpu_s: FloatArray
    shortest_s: FloatArray


def sizes(trace: Trace, keep: BoolArray | None = None) -> Sizes:
    """Least GPU-seconds and least time of every training job (of those marked)."""
    best = trace.best_rates
    area, shortest = np.zeros(len(trace)), np.zeros(len(trace))
    cache: dict[tuple[int, int, int], tuple[float, float]] = {}
    for j in range(len(trace)):
        low, high = int(trace.min_workers[j]), int(trace.max_workers[j])
        works, curves = trace.phases[j] if trace.phases else ((trace.work[j],), (trace.curve[j],))
        for work, curve in zip(works, curves, strict=True):
            key = int(curve), low, high
            if key not in cache:
                n = np.arange(low, high + 1)
                rate = best[key[0], np.minimum(n, best.shape[1] - 1)]
                with np.errstate(divide="ignore"):
                    cache[key] = float((n / rate).min()), float(1 / rate.max())
            per_area, per_time = cache[key]
            area[j] += work * per_area * trace.width[j] / GPU if work else 0.0
            shortest[j] += work * per_time if work else 0.0
    mask = np.ones(len(trace), np.bool_) if keep is None else keep.copy()
    if trace.services:
        mask &= np.array([load is None for load in trace.services])
    return Sizes(trace.submit_s[mask], area[mask], shortest[mask])


def makespan(of: Sizes, gpus: float) -> float:
    """From the first submission to the last completion."""
    if not len(of.submit_s):
        return math.nan
    behind = np.cumsum(of.area_gpu_s[::-1])[::-1] / gpus
    end = max(float((of.submit_s + of.shortest_s).max()), float((of.submit_s + behind).max()))
    return end - float(of.submit_s.min())


def average_jct(of: Sizes, gpus: float) -> float:
    """The best of the three bounds on the mean completion time."""
    if not len(of.submit_s):
        return math.nan
    alone = float(of.shortest_s.mean())
    size = of.area_gpu_s / gpus
    shortest_first = _one_machine(of.submit_s, size, size, falls=True)
    smallest_first = _one_machine(of.submit_s, size, of.area_gpu_s, falls=False)
    ends = float((shortest_first.end_s - of.submit_s).mean())
    busy = float((smallest_first.busy_s + of.shortest_s / 2 - of.submit_s).mean())
    return max(alone, ends, busy)


class _Machine(msgspec.Struct, frozen=True):
    end_s: FloatArray
    busy_s: FloatArray
    """The mean of the moments at which the job was worked on."""


def _one_machine(submit: FloatArray, size: FloatArray, key: FloatArray, *, falls: bool) -> _Machine:
    """Preemptive one-machine schedule by smallest key; the key falls to the remaining size where asked."""
    n = len(submit)
    end, moment = submit.copy(), np.zeros(n)
    left, start, keys = size.tolist(), submit.tolist(), key.tolist()
    queue: list[tuple[float, int]] = []
    now, following = 0.0, 0
    while following < n or queue:
        if not queue:
            now = max(now, start[following])
        while following < n and start[following] <= now:
            heapq.heappush(queue, (keys[following], following))
            following += 1
        _, j = heapq.heappop(queue)
        until = now + left[j]
        interrupted = following < n and start[following] < until
        if interrupted:
            until = start[following]
        moment[j] += (until - now) * (until + now) / 2
        left[j] -= until - now
        now = until
        if interrupted:
            heapq.heappush(queue, (left[j] if falls else keys[j], j))
        else:
            end[j] = now
    with np.errstate(invalid="ignore", divide="ignore"):
        busy = np.where(size > 0, moment / size, submit)
    return _Machine(end, busy)
