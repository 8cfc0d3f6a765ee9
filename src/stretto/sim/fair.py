"""The fair world: every active job holds the same share of the cluster, continuously and for free.

A job's share is capped at its maximum, or at the size where it is fastest; below its minimum its speed is linear in the
share. Completion times here are what finish-time fairness compares with: rho = completion time / completion time in
this world.

Jobs of one kind (same curve, limits and width) run at the same speed at every moment, so one clock of work per
kind is enough: a job that arrives when the clock shows v ends when it shows v + its work. An event costs as much
as there are kinds active, however many jobs are. Plain lists: there are few kinds and very many events.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort

import numpy as np

from stretto.core.snapshot import FloatArray
from stretto.sim.trace import Trace


def fair_finish(trace: Trace, gpus_milli: int) -> FloatArray:
    """When each job would end under continuous equal share. Services are not part of this world: nan."""
    finish = np.full(len(trace), np.nan)
    arrivals = [j for j in range(len(trace)) if not (trace.services and trace.services[j] is not None)]
    submit = trace.submit_s.tolist()
    world = _FairWorld(trace, gpus_milli)
    following = 0
    while following < len(arrivals) or world.active:
        arrival = submit[arrivals[following]] if following < len(arrivals) else math.inf
        kind, end = world.next_end()
        if end <= arrival:
            job = world.end(kind, end)
            if job is not None:
                finish[job] = end
        else:
            world.advance(arrival)
            while following < len(arrivals) and submit[arrivals[following]] <= arrival:
                world.enter(arrivals[following], 0)
                following += 1
        world.share()
    return finish


class _FairWorld:
    """Clocks, heaps and speeds per kind; kinds are numbered by the size of their cap."""

    def __init__(self, trace: Trace, gpus_milli: int) -> None:
        self.gpus_milli = float(gpus_milli)
        self.kind, kinds = _kinds(trace)
        self.work = [w[0].tolist() for w in trace.phases] if trace.phases else [[w] for w in trace.work.tolist()]
        rates = trace.rates.mean(axis=0)
        self.width = [float(width) for _, _, _, width in kinds]
        self.cap = [float(high * width) for _, _, high, width in kinds]
        self.table = [_line(rates, curve, low, high) for curve, low, high, _ in kinds]
        self.full = [line[-1] for line in self.table]
        self.clock, self.speed = [0.0] * len(kinds), [0.0] * len(kinds)
        self.heap: list[list[tuple[float, int, int]]] = [[] for _ in kinds]
        self.active: list[int] = []
        self.wanted = 0.0
        self.now = 0.0

    def next_end(self) -> tuple[int, float]:
        """The kind whose first job ends next, and when."""
        best, soonest = -1, math.inf
        for k in self.active:
            left = (self.heap[k][0][0] - self.clock[k]) / self.speed[k]
            if left < soonest:
                best, soonest = k, left
        return best, self.now + soonest

    def advance(self, moment: float) -> None:
        passed = moment - self.now
        for k in self.active:
            self.clock[k] += self.speed[k] * passed
        self.now = moment

    def end(self, kind: int, moment: float) -> int | None:
        """Let the first job of the kind end its phase; the job, if that was its last."""
        self.advance(moment)
        target, job, phase = heapq.heappop(self.heap[kind])
        self.clock[kind] = target
        self.wanted -= self.cap[kind]
        if not self.heap[kind]:
            self.active.remove(kind)
        if phase + 1 < len(self.work[job]):
            self.enter(job, phase + 1)
            return None
        return job

    def enter(self, job: int, phase: int) -> None:
        kind = self.kind[job][phase]
        if not self.heap[kind]:
            insort(self.active, kind)
        heapq.heappush(self.heap[kind], (self.clock[kind] + self.work[job][phase], job, phase))
        self.wanted += self.cap[kind]

    def share(self) -> None:
        """Set the speeds: everybody its cap, or the level at which the cluster is just full."""
        if self.wanted <= self.gpus_milli:
            for k in self.active:
                self.speed[k] = self.full[k]
            return
        free, jobs = self.gpus_milli, sum(len(self.heap[k]) for k in self.active)
        for k in self.active:
            count = len(self.heap[k])
            share = min(self.cap[k], free / jobs)
            self.speed[k] = self._speed(k, share / self.width[k])
            free -= count * share
            jobs -= count

    def _speed(self, kind: int, workers: float) -> float:
        line, whole = self.table[kind], int(workers)
        if whole + 1 >= len(line):
            return line[-1]
        return line[whole] + (line[whole + 1] - line[whole]) * (workers - whole)


def _kinds(trace: Trace) -> tuple[list[list[int]], list[tuple[int, int, int, int]]]:
    """The kind of every phase of every job, and the kinds (curve, minimum, maximum, width) by rising cap."""
    limits = list(
        zip(trace.min_workers.tolist(), trace.max_workers.tolist(), np.maximum(trace.width, 1).tolist(), strict=True)
    )
    curves = [c.tolist() for _, c in trace.phases] if trace.phases else [[c] for c in trace.curve.tolist()]
    raw = [[(curve, *limit) for curve in of_job] for of_job, limit in zip(curves, limits, strict=True)]
    raw = _at_most_the_best(raw, trace.rates.mean(axis=0))
    kinds = sorted({kind for of_job in raw for kind in of_job}, key=lambda kind: (kind[2] * kind[3], kind))
    number = {kind: i for i, kind in enumerate(kinds)}
    return [[number[kind] for kind in of_job] for of_job in raw], kinds


def _at_most_the_best(
    raw: list[list[tuple[int, int, int, int]]], rates: FloatArray
) -> list[list[tuple[int, int, int, int]]]:
    """The same kinds; where a curve falls before the maximum, the size at which it is highest is the maximum."""
    best: dict[tuple[int, int, int, int], tuple[int, int, int, int]] = {}
    for curve, low, high, width in {kind for of_job in raw for kind in of_job}:
        line = rates[curve, np.minimum(np.arange(low, high + 1), rates.shape[1] - 1)]
        most = low + int(np.argmax(line)) if line[-1] < line.max() else high
        best[curve, low, high, width] = curve, low, most, width
    return [[best[kind] for kind in of_job] for of_job in raw]


def _line(rates: FloatArray, curve: int, low: int, high: int) -> list[float]:
    """Steps/s on 0..high workers, linear below the minimum; never falling, since nobody has to use all of its share;
    never quite nothing, so that every job ends."""
    line = rates[curve, np.minimum(np.arange(high + 1), rates.shape[1] - 1)].copy()
    line[:low] = line[low] * np.arange(low) / low
    line = np.maximum.accumulate(line)
    floor = 1e-9 * max(float(line.max()), 1e-9)
    return [max(float(rate), floor) if n else 0.0 for n, rate in enumerate(line)]
