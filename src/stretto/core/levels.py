"""Multi-level queues by attained service: the order that the Tiresias policies walk.

A job enters at the tail of queue 0. Service attained since its last promotion takes it down: at each limit it goes to
the tail of the next queue. Queues are walked in turn, each in list order; in each, the jobs that were running before
stand ahead of the waiting ones, so an older waiting job does not displace a running one of its own queue.
With `promote` = c, a job that has waited c times as long as it has run goes back to the tail of queue 0, as if new.

The order cannot be told from a snapshot alone, so it is carried along as a `Kept` value. The moments at which jobs
change queues are whole microseconds, so that rounding never decides whether a limit was reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


class Levels(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration."""

    limits: tuple[float, ...]
    """Attained service at which queues 0, 1, … end; the last queue has no limit."""
    counts: Literal["gpu", "time"] = "gpu"
    """Whether service is GPU-seconds or seconds with workers."""
    promote: float = 0.0
    """Waiting time over running time that takes a job back to queue 0; 0: never."""
    running_first: bool = True
    """Inside a queue, running jobs stand ahead of waiting ones; otherwise the order of entry alone counts."""
    index: Callable[[float, int], float] | None = None
    """Of attained service and queue: larger goes first inside a queue, then the earlier submitted."""
    original: bool = False
    """As Tiresias' own simulator counts: whole seconds; one queue down per event; a job is next visited
    (limit - seconds run) / GPUs ahead, rounded down, although its service counts GPUs already; jobs of equal
    index and submission keep the list's order."""

    def crossing_s(self, now_s: float, level: int, served: float, rate: float) -> float:
        """When a job that attains `rate` per second from now on reaches the end of its queue."""
        if level >= len(self.limits) or not rate:
            return math.inf
        return on_grid(now_s + (self.limits[level] - served) / rate)

    def visit_s(self, now_s: float, level: int, served: float, rate: float, ran_s: float) -> float:
        """When to look at a running job again: at that moment, or when the original believes it comes."""
        if not self.original or self.counts == "time" or level >= len(self.limits) or not rate:
            return self.crossing_s(now_s, level, served, rate)
        return now_s + max(1, math.floor(on_grid((self.limits[level] - ran_s) / rate)))

    def promotion_s(self, now_s: float, level: int, ran_s: float, waited_s: float) -> float:
        """When a job that waits from now on goes back to queue 0."""
        if not self.promote or not level or not ran_s:
            return math.inf
        patience_s = self.promote * ran_s
        return on_grid(now_s + (math.floor(patience_s) if self.original else patience_s) - waited_s)

    def rank(self, served: float, level: int) -> float:
        """Smaller goes first inside a queue; service counts in thousandths, for the same reason."""
        return -self.index(round(served, 3), level) if self.index else 0.0


class Kept(msgspec.Struct, frozen=True):
    """What is remembered of the active jobs, in list order: queue, and the counters at the last promotion."""

    job: IntArray
    level: IntArray
    gpu_s: FloatArray
    ran_s: FloatArray
    waited_s: FloatArray
    """At the first run after it: waiting counts from there on."""


class Arranged(msgspec.Struct, frozen=True):
    """The jobs in the order to walk; the other columns are in the order of the snapshot."""

    order: IntArray
    level: IntArray
    served: FloatArray
    rate: FloatArray
    ran_s: FloatArray
    waited_s: FloatArray
    kept: Kept


def arrange(levels: Levels, view: Snapshot, kept: Kept | None, size: IntArray) -> Arranged:
    """Bring the queues up to date: newcomers in, then demotions and promotions by job number; and order the jobs."""
    place, known, level, gpu_0, ran_0, waited_0 = _recall(view, kept)
    ran_s = view.ran_s - ran_0
    waited_0 = np.where(ran_s > 0, waited_0, view.waited_s)
    by_gpu = levels.counts == "gpu"
    served = view.gpu_s - gpu_0 if by_gpu else ran_s
    rate = size * view.width / GPU if by_gpu else np.ones(len(view))
    running = view.workers > 0
    down = _demotions(levels, view.now_s, level, served, rate) * (running | ~known)
    up = _promotions(levels, view.now_s, level, ran_s, view.waited_s - waited_0, running)
    level = np.where(up, 0, level + down)
    gpu_0, ran_0 = np.where(up, view.gpu_s, gpu_0), np.where(up, view.ran_s, ran_0)
    waited_0, served = np.where(up, view.waited_s, waited_0), np.where(up, 0.0, served)
    moved = up | (down > 0)
    group = np.where(moved, 3, np.where(known, np.where(running & levels.running_first, 0, 1), 2))
    spot = np.where(moved | ~known, np.arange(len(view)), place)
    order = np.lexsort((spot, group, level))
    if levels.index is not None:
        order = _by_index(levels, view, order, level, served)
    now_kept = Kept(view.job[order], level[order], gpu_0[order], ran_0[order], waited_0[order])
    return Arranged(order, level, served, rate, view.ran_s - ran_0, view.waited_s - waited_0, now_kept)


def next_change_s(levels: Levels, view: Snapshot, arranged: Arranged, runs: BoolArray) -> float:
    """When the next job changes queues, if those marked run from now on and nothing else happens."""
    now_s = view.now_s
    running = _rows(runs, arranged.level, arranged.served, arranged.rate, arranged.ran_s)
    moments = [levels.visit_s(now_s, *job) for job in running]
    if levels.promote:
        waiting = _rows(~runs, arranged.level, arranged.ran_s, arranged.waited_s)
        moments += [levels.promotion_s(now_s, *job) for job in waiting]
    return min((moment for moment in moments if moment > now_s), default=math.inf)


def on_grid(at_s: float) -> float:
    """The nearest whole microsecond."""
    return round(at_s * 1e6) / 1e6 if math.isfinite(at_s) else at_s


def _rows(chosen: BoolArray, *columns: IntArray | FloatArray) -> Iterator[tuple[Any, ...]]:
    return zip(*(column[chosen].tolist() for column in columns), strict=True)


def _recall(
    view: Snapshot, kept: Kept | None
) -> tuple[IntArray, BoolArray, IntArray, FloatArray, FloatArray, FloatArray]:
    """Of each job in the snapshot: its place in the list, whether it is known, its queue and counters."""
    n = len(view)
    zero, zeros = np.zeros(n, np.int64), np.zeros(n)
    if kept is None or not len(kept.job):
        return zero, np.zeros(n, np.bool_), zero, zeros, zeros, zeros
    by_number = np.argsort(kept.job)
    found = np.searchsorted(kept.job, view.job, sorter=by_number)
    place = by_number[np.minimum(found, len(by_number) - 1)]
    known = kept.job[place] == view.job
    level = np.where(known, kept.level[place], 0)
    gpu_s, ran_s, waited_s = (np.where(known, c[place], 0.0) for c in (kept.gpu_s, kept.ran_s, kept.waited_s))
    return place, known, level, gpu_s, ran_s, waited_s


def _demotions(levels: Levels, now_s: float, level: IntArray, served: FloatArray, rate: FloatArray) -> IntArray:
    """How many queues each job's service takes it down; in the original, one at most."""
    limits = np.array((*levels.limits, math.inf))
    down = np.zeros(len(level), np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(1 if levels.original else len(levels.limits)):
            crossing_s = np.rint((now_s + (limits[level + down] - served) / rate) * 1e6) / 1e6
            down += crossing_s <= now_s
    return down


def _promotions(
    levels: Levels, now_s: float, level: IntArray, ran_s: FloatArray, waited_s: FloatArray, running: BoolArray
) -> BoolArray:
    up = np.zeros(len(level), np.bool_)
    if levels.promote:
        for j in np.flatnonzero(~running & (level > 0)).tolist():
            up[j] = levels.promotion_s(now_s, int(level[j]), float(ran_s[j]), float(waited_s[j])) <= now_s
    return up


def _by_index(levels: Levels, view: Snapshot, order: IntArray, level: IntArray, served: FloatArray) -> IntArray:
    pairs = zip(served[order].tolist(), level[order].tolist(), strict=True)
    rank = np.array([levels.rank(service, queue) for service, queue in pairs])
    tie = np.arange(len(order)) if levels.original else view.job[order]
    by_rank: IntArray = order[np.lexsort((tie, view.submit_s[order], rank, level[order]))]
    return by_rank
