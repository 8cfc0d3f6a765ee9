"""What the policies that hand out workers by their gain have in common.

Once minimums are given, the rest goes worker by worker to whoever gains most from it (`grow`), and every job gets a
reason (`decision`). Values are rows `[job, workers]`: what a job is worth on that many workers, in any unit;
only differences along a row count.
"""

from __future__ import annotations

import heapq
import math
from typing import TypeAlias

import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

Number: TypeAlias = FloatArray | IntArray | float
"""One number for all jobs, or one each."""

_MINUTE_S = 60.0
_HAIR = 1e-9


def useful_maximum(view: Snapshot) -> IntArray:
    """The most workers worth looking at: curves are level beyond the end of their table."""
    top = view.rates.shape[2] - 1
    most: IntArray = np.maximum(view.min_workers, np.minimum(view.max_workers, top))
    return most


def speeds(view: Snapshot) -> FloatArray:
    """Steps/s of every job on 0, 1, 2 … workers, one row each, as far as any job can use them."""
    count = int(useful_maximum(view).max(initial=0))
    column = np.minimum(np.arange(count + 1), view.rates.shape[2] - 1)
    table: FloatArray = view.rates[0][np.ix_(view.curve, column)]
    return table


def lengths(view: Snapshot) -> FloatArray:
    """Steps left. An unknown length is taken to be what is done so far, and a minute on the minimum at least.

    A job that has nothing left counts as having a hair: it, too, would rather grow than leave GPUs idle.
    """
    guess = np.maximum(view.done, _MINUTE_S * view.rate(view.min_workers))
    known: FloatArray = np.where(np.isnan(view.remaining), guess, view.remaining)
    return np.maximum(known, _HAIR)


def smallest_need(view: Snapshot) -> IntArray:
    """Milli-GPU that each job takes at its minimum."""
    need: IntArray = view.min_workers * view.width + view.fixed_milli
    return need


def grow(
    view: Snapshot, value: FloatArray, workers: IntArray, free: int, *, longest: int | None = None
) -> tuple[FloatArray, int]:
    """Spend the free room on the running jobs, always on the largest gain per GPU; their last gains, what is left.

    A step is as long as pays best (`best_step`), so a job does not stop growing where its row is level for a
    while. With concave rows and equal widths every step is one worker and the sum of values becomes the largest
    there is. Ties go to the earlier job. No step is of more than `longest` workers. `workers` is written.
    """
    most, width = useful_maximum(view).tolist(), view.width.tolist()
    last = np.zeros(len(view))
    heap: list[tuple[float, int, int]] = []

    def offer(j: int) -> None:
        n = int(workers[j])
        reach = min(most[j] - n, free // max(width[j], 1), longest or most[j])
        if reach > 0:
            step, gain = best_step(value[j, n : n + reach + 1])
            if gain > 0:
                heapq.heappush(heap, (-gain * GPU / max(width[j], 1), j, step))

    for j in np.flatnonzero(workers).tolist():
        offer(j)
    while heap:
        gain, j, step = heapq.heappop(heap)
        if step * width[j] <= free:
            free -= step * width[j]
            workers[j] += step
            last[j] = -gain
        offer(j)
    return last, free


def best_step(row: FloatArray) -> tuple[int, float]:
    """How many workers to add for the largest gain per worker, and that gain; `row[0]` is the value now."""
    if len(row) == 2:
        return 1, float(row[1] - row[0])
    gain = (row[1:] - row[0]) / np.arange(1, len(row))
    best = int(np.argmax(gain))
    return best + 1, float(gain[best])


def next_gain(view: Snapshot, value: FloatArray, workers: IntArray) -> FloatArray:
    """What one more worker would gain each job, per GPU; 0 at its useful maximum."""
    jobs = np.arange(len(view))
    more = np.minimum(workers + 1, useful_maximum(view))
    gain: FloatArray = (value[jobs, more] - value[jobs, np.minimum(workers, more)]) * GPU / np.maximum(view.width, 1)
    return gain


def decision(
    view: Snapshot,
    workers: IntArray,
    left: FloatArray,
    last: FloatArray,
    ahead: FloatArray,
    *,
    memory: Memory = None,
    wake_s: float = math.inf,
) -> Decision:
    """The decision with a reason for every job.

    `left` is the room at the job's turn (milli-GPU), `last` the gain of its last worker where it got more than its
    minimum, `ahead` what another worker would gain it. The limit named in reasons is the smallest gain that won.
    """
    won = last[last > 0]
    limit = float(won.min()) if len(won) else 0.0
    low, now, before = smallest_need(view) / GPU, workers, view.workers
    need = np.where(now > 0, now * view.width + view.fixed_milli, smallest_need(view)) / GPU
    room = left / GPU
    told = Told(len(view), Reason.LITTLE_GAIN, ahead, limit)
    told.because(Reason.SHRUNK, now < before, now, limit)
    told.because(Reason.GROWN, now > before, last, limit)
    told.because(Reason.NO_USE_FOR_MORE, ahead <= 0, now, 0.0)
    told.because(Reason.AT_MAXIMUM, now >= view.max_workers, now, 0.0)
    told.because(Reason.RUNS, before == 0, need, room)
    told.because(Reason.NO_ROOM, now == 0, low, room)
    told.because(Reason.PREEMPTED, (now == 0) & (before > 0), low, room)
    told.because(Reason.TOO_LARGE, (now == 0) & (low > view.total_milli / GPU), low, view.total_milli / GPU)
    return Decision.of(view, workers, told.reason, told.first, told.second, memory=memory, wake_s=wake_s)


class Told:
    """Reasons under construction: one for everybody, then better ones for some; what is told last holds."""

    def __init__(self, jobs: int, code: Reason, first: Number, second: Number) -> None:
        self.reason = np.full(jobs, np.int64(code))
        self.first, self.second = np.full(jobs, first, np.float64), np.full(jobs, second, np.float64)

    def because(self, code: Reason, where: BoolArray, first: Number, second: Number) -> None:
        """The reason of the marked jobs, with its two numbers."""
        np.copyto(self.reason, np.int64(code), where=where)
        np.copyto(self.first, first, where=where)
        np.copyto(self.second, second, where=where)
