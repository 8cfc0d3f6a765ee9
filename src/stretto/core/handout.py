"""Who gets the workers that are left: the building blocks of elastic policies.

First everyone's minimum (`give_minimums`), then the rest: one worker each in turns (`round_robin`), each job in
turn as much as it can use (`fill_in_order`), or whoever gains most (`spend_by_gain`). Nobody gets less than its
minimum, more than its maximum, or a worker that adds no speed (`useful`). The arrays `workers` and `left` are
written; what stays free is returned.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.marginal import best_step, smallest_need, speeds
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


def useful(view: Snapshot) -> IntArray:
    """The size, minimum to maximum, beyond which more workers add no speed."""
    columns = min(int(view.max_workers.max(initial=0)) + 1, view.rates.shape[2])
    full = view.rate(view.max_workers)
    slower = view.rates[0, view.curve, :columns] < full[:, None]
    size: IntArray = np.clip(slower.sum(axis=1), view.min_workers, view.max_workers)
    return size


def speedups(view: Snapshot) -> FloatArray:
    """Throughput over that of one worker, [job, workers]; below its smallest working size a job counts as linear."""
    speed = speeds(view)
    if not len(view):
        return speed
    one, low = view.rate(np.ones(len(view), np.int64)), view.rate(view.min_workers)
    base = np.where(one > 0, one, low / view.min_workers)
    return speed / np.where(base > 0, base, 1.0)[:, None]


def held(view: Snapshot) -> tuple[IntArray, int]:
    """What the running jobs go on holding, and the room beside them.

    They keep all they have, unless room was lost (a node, or services that grew): then the latest give way.
    """
    workers = view.workers.copy()
    need = (workers * view.width + view.fixed_milli).tolist()
    free = view.total_milli
    for j in np.flatnonzero(workers).tolist():
        if need[j] <= free:
            free -= need[j]
        else:
            workers[j] = 0
    return workers, free


def give_minimums(view: Snapshot, order: IntArray, workers: IntArray, left: FloatArray, free: int) -> int:
    """In this order, give each job without workers its minimum if that fits; `left` is the room at its turn."""
    need, low = smallest_need(view).tolist(), view.min_workers.tolist()
    for j in order[workers[order] == 0].tolist():
        left[j] = free
        if need[j] <= free:
            free -= need[j]
            workers[j] = low[j]
    return free


def round_robin(view: Snapshot, order: IntArray, workers: IntArray, top: IntArray, free: int) -> int:
    """One more worker for each running job in this order, over and over, until nothing fits or all are at `top`.

    Whole turns are given at once: as many as nobody's `top` ends and the room allows.
    """
    queue = order[workers[order] > 0]
    while True:
        queue = queue[(workers[queue] < top[queue]) & (view.width[queue] <= free)]
        if not len(queue):
            return free
        turn = int(view.width[queue].sum())
        turns = min(int((top - workers)[queue].min()), free // max(turn, 1))
        if turns:
            workers[queue] += turns
            free -= turns * turn
        else:
            free = _part_of_a_turn(view, queue, workers, free)


def fill_in_order(view: Snapshot, order: IntArray, workers: IntArray, top: IntArray, free: int) -> int:
    """In this order, give each running job as many workers as fit, up to `top`."""
    queue = order[(workers[order] > 0) & (workers[order] < top[order])]
    wish, width = (top - workers)[queue].tolist(), view.width[queue].tolist()
    for j, most, wide in zip(queue.tolist(), wish, width, strict=True):
        more = min(most, free // max(wide, 1))
        workers[j] += more
        free -= more * wide
        if not free:
            break
    return free


def spend_by_gain(
    view: Snapshot, value: FloatArray, order: IntArray, workers: IntArray, top: IntArray, free: int
) -> tuple[FloatArray, int]:
    """Spend the room on the jobs of `order`, always on the largest gain in value per GPU; last gains, what is left.

    Like `marginal.grow`, but waiting jobs compete as well: their first grant is the whole minimum, at its
    value per GPU. Ties go to the job that comes first in `order`.
    """
    most, need = top.tolist(), smallest_need(view).tolist()
    low, width = view.min_workers.tolist(), view.width.tolist()
    last = np.zeros(len(view))
    heap: list[tuple[float, int, int, int]] = []

    def offer(rank: int, j: int) -> None:
        n = int(workers[j])
        reach = min(most[j] - n, free // max(width[j], 1)) if n else 0
        if reach > 0:
            step, gain = best_step(value[j, n : n + reach + 1])
            if gain > 0:
                heapq.heappush(heap, (-gain * GPU / max(width[j], 1), rank, j, step))
        elif not n and need[j] <= free and value[j, low[j]] > 0:
            heapq.heappush(heap, (-float(value[j, low[j]]) * GPU / max(need[j], 1), rank, j, low[j]))

    for rank, j in enumerate(order.tolist()):
        offer(rank, j)
    while heap:
        gain, rank, j, step = heapq.heappop(heap)
        cost = step * width[j] if workers[j] else need[j]
        if cost <= free:
            free -= cost
            workers[j] += step
            last[j] = -gain
        offer(rank, j)
    return last, free


def decision(
    view: Snapshot,
    workers: IntArray,
    top: IntArray,
    left: FloatArray,
    *,
    between: Reason = Reason.FAIR_SHARE,
    memory: Memory = None,
    wake_s: float = math.inf,
) -> Decision:
    """The decision with a reason for every job; `between` is that of jobs that run below `top`.

    Each comes with the GPUs the job holds, or needs at least, and those that were left at its turn (`left`, milli).
    """
    low, runs = smallest_need(view) / GPU, workers > 0
    reason = np.where(runs, np.int64(between), np.int64(Reason.NO_ROOM))
    first = np.where(runs, (workers * view.width + view.fixed_milli) / GPU, low)
    second = left / GPU

    def because(code: Reason, where: BoolArray, one: FloatArray | IntArray, two: FloatArray | float) -> None:
        np.copyto(reason, np.int64(code), where=where)
        np.copyto(first, one, where=where)
        np.copyto(second, two, where=where)

    because(Reason.NO_USE_FOR_MORE, runs & (workers >= top), workers, second)
    because(Reason.AT_MAXIMUM, runs & (workers >= view.max_workers), workers, second)
    because(Reason.PREEMPTED, ~runs & (view.workers > 0), low, second)
    because(Reason.TOO_LARGE, ~runs & (low > view.total_milli / GPU), low, view.total_milli / GPU)
    return Decision.of(view, workers, reason, first, second, memory=memory, wake_s=wake_s)


def _part_of_a_turn(view: Snapshot, queue: IntArray, workers: IntArray, free: int) -> int:
    """The last turn, for which the room is too small: those it does not suffice for are passed over."""
    for j, wide in zip(queue.tolist(), view.width[queue].tolist(), strict=True):
        if wide <= free:
            workers[j] += 1
            free -= wide
    return free
