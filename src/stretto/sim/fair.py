"""The fair world: every active job holds the same share of the cluster, continuously and for free.

A job's share is capped at its maximum; below its minimum its speed is linear in the share. Completion times here
are what finish-time fairness compares with: rho = completion time / completion time in this world.

Jobs of one kind (same curve, limits and width) run at the same speed at every moment, so one clock of work per
kind is enough: a job that arrives when the clock shows v ends when it shows v + its work. An event costs as much
as there are kinds, however many jobs are active.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from stretto.core.snapshot import FloatArray
from stretto.sim.trace import Trace


def fair_finish(trace: Trace, gpus_milli: int) -> FloatArray:
    """When each job would end under continuous equal share. Services are not part of this world."""
    kinds = _Kinds(trace)
    finish = np.full(len(trace), np.nan)
    heaps: list[list[tuple[float, int, int]]] = [[] for _ in range(len(kinds))]
    count = np.zeros(len(kinds))
    clock, head, speed = np.zeros(len(kinds)), np.full(len(kinds), math.inf), np.zeros(len(kinds))
    arrivals = [j for j in range(len(trace)) if not (trace.services and trace.services[j] is not None)]
    submit = trace.submit_s.tolist()
    now, following, active = 0.0, 0, 0

    def enter(job: int, phase: int) -> None:
        kind, work = kinds.of(job, phase)
        heapq.heappush(heaps[kind], (clock[kind] + work, job, phase))
        head[kind] = heaps[kind][0][0]
        count[kind] += 1

    while following < len(arrivals) or active:
        arrival = submit[arrivals[following]] if following < len(arrivals) else math.inf
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.where(count > 0, (head - clock) / speed, math.inf)
        kind = int(np.argmin(ends))
        step = float(ends[kind])
        if now + step <= arrival:
            clock += speed * step
            clock[kind] = head[kind]
            now += step
            _, job, phase = heapq.heappop(heaps[kind])
            head[kind] = heaps[kind][0][0] if heaps[kind] else math.inf
            count[kind] -= 1
            if kinds.has(job, phase + 1):
                enter(job, phase + 1)
            else:
                finish[job] = now
                active -= 1
        else:
            clock += speed * (arrival - now)
            now = arrival
            while following < len(arrivals) and submit[arrivals[following]] <= now:
                enter(arrivals[following], 0)
                following += 1
                active += 1
        speed = kinds.speed(count, gpus_milli)
    return finish


class _Kinds:
    """The distinct (curve, minimum, maximum, width), and how fast each goes at a given share."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        number: dict[tuple[int, int, int, int], int] = {}
        self.kind: list[list[int]] = []
        for j in range(len(trace)):
            curves = trace.phases[j][1].tolist() if trace.phases else [int(trace.curve[j])]
            limits = int(trace.min_workers[j]), int(trace.max_workers[j]), max(int(trace.width[j]), 1)
            self.kind.append([number.setdefault((c, *limits), len(number)) for c in curves])
        rates = trace.rates.mean(axis=0)
        top = rates.shape[1] - 1
        self.caps = np.array([high * width for _, _, high, width in number], np.float64)
        self.order = np.argsort(self.caps, kind="stable")
        self.width = np.array([width for *_, width in number], np.float64)
        longest = max(high for _, _, high, _ in number)
        self.table = np.zeros((len(number), longest + 2))
        for i, (curve, low, high, _) in enumerate(number):
            line = rates[curve, np.minimum(np.arange(high + 1), top)].copy()
            line[:low] = line[low] * np.arange(low) / low
            self.table[i, : high + 1] = line
            self.table[i, high + 1 :] = line[-1]
        self.rows = np.arange(len(number))
        self.full = self.table[self.rows, (self.caps / self.width).astype(np.int64)]

    def __len__(self) -> int:
        return len(self.caps)

    def of(self, job: int, phase: int) -> tuple[int, float]:
        """Kind and work of a job's phase."""
        work = self.trace.phases[job][0][phase] if self.trace.phases else self.trace.work[job]
        return self.kind[job][phase], float(work)

    def has(self, job: int, phase: int) -> bool:
        return phase < len(self.kind[job])

    def speed(self, count: FloatArray, gpus_milli: int) -> FloatArray:
        """Steps/s of each kind when so many jobs of each are active."""
        if float(count @ self.caps) <= gpus_milli:
            return self.full
        level = self._level(count, gpus_milli)
        share = np.minimum(self.caps, level) / self.width
        low = share.astype(np.int64)
        part = share - low
        speed: FloatArray = self.table[self.rows, low] * (1 - part) + self.table[self.rows, low + 1] * part
        return speed

    def _level(self, count: FloatArray, gpus_milli: int) -> float:
        """The share c with sum(min(cap, c)) = capacity."""
        caps, number = self.caps[self.order], count[self.order]
        filled = np.concatenate(((0.0,), np.cumsum(caps * number)[:-1]))
        above = np.cumsum(number[::-1])[::-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            level = (gpus_milli - filled) / above
        return float(level[int(np.argmax((level <= caps) & (above > 0)))])
