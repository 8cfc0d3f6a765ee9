"""Fulfilment: the autoscaler of PaddlePaddle Cloud, as it was meant.

Its score says how much of its range a job has: (workers - minimum) / (maximum - minimum). The least fulfilled job
grows first, the most fulfilled shrinks first.

Why a decision ends, and the next one on an unchanged world changes nothing: growing and shrinking share one limit.
Shrinking only takes workers away, none below a minimum, and stops at the limit; only then growing starts, it only adds
workers, none above a maximum, and never passes the limit. So neither undoes the other (the original shrank at
97 % and grew to 100 %, for ever), each takes at most as many steps as there are workers, and at the end either
nothing fits under the limit or nothing can shrink.
"""

from __future__ import annotations

import heapq
import math
from typing import Annotated

import msgspec
import numpy as np

from stretto.core import handout
from stretto.core.decision import Decision, Memory
from stretto.core.options import Seconds
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_load_desired: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.97
    """Share of the GPUs that jobs may grow into; what is above, in whole GPUs, is kept for minimums of newcomers."""
    freeze_s: Seconds = 0.0
    """A job is not resized again before this long after its last start or resize."""


class Range(msgspec.Struct, frozen=True):
    """Between which sizes each job may be moved now, and the whole range that its score counts."""

    low: IntArray
    high: IntArray
    low_ever: IntArray
    high_ever: IntArray

    def score(self, j: int, workers: int) -> float:
        """How fulfilled the job is on so many workers: 0 at its minimum, 1 at its useful maximum."""
        span = int(self.high_ever[j] - self.low_ever[j])
        return (workers - int(self.low_ever[j])) / span if span else 1.0


@policy(
    "fulfilment",
    traits=Traits(preempts="never", elastic=True, uses=frozenset({"curve"})),
    options=Options,
)
def fulfilment(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Grow the least fulfilled job, shrink the most fulfilled; the minimums of waiting jobs make the pressure.

    1. Waiting jobs get their minimum, in order of submission, if it fits beside the minimums of the running ones.
    2. While the load is above the limit, the most fulfilled job gives one worker back, never below its minimum.
    3. While one more worker stays within the limit, the least fulfilled job whose worker fits gets it.
    The limit is `max_load_desired` of the GPUs, without the fraction of a GPU that this leaves; it is all of
    them when every job could have its maximum at once. Scores change with every worker; equal ones go by the
    smaller worker, then by age. Running jobs are never stopped; a wide minimum may wait for ever.
    """
    top = handout.useful(view)
    bounds, thaw_s = _bounds(view, top, options.freeze_s)
    workers, left = _admit(view, bounds)
    need = np.where(workers > 0, workers * view.width + view.fixed_milli, 0)
    limit = _limit(view, top, options.max_load_desired)
    room = limit - int(need.sum())
    room = _shrink(view, bounds, workers, room)
    _grow(view, bounds, workers, room)
    wake_s = thaw_s if (workers < top).any() else math.inf
    return handout.decision(view, workers, top, left, wake_s=wake_s)


def _bounds(view: Snapshot, top: IntArray, freeze_s: float) -> tuple[Range, float]:
    """The range of each job, and when the next frozen one thaws."""
    runs = view.workers > 0
    frozen = runs & (view.changed_s + freeze_s > view.now_s) & (freeze_s > 0)
    low = np.where(frozen, view.workers, view.min_workers)
    if int((low * view.width + view.fixed_milli)[runs].sum()) > view.total_milli:
        frozen = np.zeros(len(view), np.bool_)  # room was lost: who stays frozen would push others out
    thaw_s = float((view.changed_s + freeze_s)[frozen].min(initial=math.inf))
    low, high = (np.where(frozen, view.workers, end) for end in (view.min_workers, top))
    return Range(low, high, view.min_workers, top), thaw_s


def _admit(view: Snapshot, bounds: Range) -> tuple[IntArray, FloatArray]:
    """Who runs: first the running jobs, then the waiting ones, as their smallest sizes fit; and the room left then.

    The running ones keep what they have, in so far as it is useful.
    """
    need = (bounds.low * view.width + view.fixed_milli).tolist()
    runs: BoolArray = view.workers > 0
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    free = view.total_milli
    for j in np.lexsort((view.job, ~runs)).tolist():
        left[j] = free
        if need[j] <= free:
            free -= need[j]
            workers[j] = min(int(view.workers[j]), int(bounds.high[j])) if runs[j] else bounds.low[j]
    return workers, left


def _limit(view: Snapshot, top: IntArray, max_load: float) -> int:
    """Milli-GPU up to which jobs may grow."""
    total = view.total_milli
    if int((top * view.width + view.fixed_milli).sum()) <= total:
        return total
    return total - math.floor(round((1 - max_load) * total / GPU, 9)) * GPU


def _shrink(view: Snapshot, bounds: Range, workers: IntArray, room: int) -> int:
    """Take workers from the most fulfilled until the room is not negative or all are at their least."""
    if room >= 0:
        return room
    width = view.width.tolist()
    jobs = np.flatnonzero(workers > bounds.low).tolist()
    heap = [(-bounds.score(j, int(workers[j])), -width[j], -j) for j in jobs]
    heapq.heapify(heap)
    while heap and room < 0:
        j = -heap[0][2]
        workers[j] -= 1
        room += width[j]
        if workers[j] > bounds.low[j]:
            heapq.heapreplace(heap, (-bounds.score(j, int(workers[j])), -width[j], -j))
        else:
            heapq.heappop(heap)
    return room


def _grow(view: Snapshot, bounds: Range, workers: IntArray, room: int) -> None:
    """Give workers to the least fulfilled while they fit the room."""
    width = view.width.tolist()
    jobs = np.flatnonzero((workers > 0) & (workers < bounds.high) & (view.width <= room)).tolist()
    heap = [(bounds.score(j, int(workers[j])), width[j], j) for j in jobs]
    heapq.heapify(heap)
    while heap:
        j = heap[0][2]
        if width[j] > room:
            heapq.heappop(heap)
            continue
        workers[j] += 1
        room -= width[j]
        if workers[j] < bounds.high[j]:
            heapq.heapreplace(heap, (bounds.score(j, int(workers[j])), width[j], j))
        else:
            heapq.heappop(heap)
