"""How large whoever runs becomes: steps 4 and 5 of the policy `stretto`, with every resize weighed against its cost.

A worker that is already there is worth more than a new one, by what a resize costs in comparison with the typical time
between two decisions: so long will the new size hold, at least. What is handed out that way is then looked at job by
job: growth that would not win back its resize in that time, or before the job ends, is dropped. What becomes
free lets jobs keep their size that were to shrink; the rest goes to jobs that start or change anyway.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.hull import Hulls
from stretto.core.policies._stretto_jobs import Jobs, Late
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


class Market(msgspec.Struct, frozen=True):
    """What a hand-out goes by."""

    curves: Hulls
    between_s: float
    """Typical time between two decisions."""
    p: float


def catch_up(view: Snapshot, late: Late | None, workers: IntArray, free: int) -> int:
    """Step 4: raise late jobs to their fair share, as far as that makes them faster, the latest first.

    What is left then is returned, `workers` is written.
    """
    if late is None:
        return free
    fair = np.minimum(view.max_workers, np.ceil(late.share - 1e-9).astype(np.int64))
    wish = np.where(late.late & (workers > 0), np.maximum(fair - workers, 0), 0)
    for j in np.lexsort((view.job, -late.behind))[: int(late.late.sum())].tolist() if wish.any() else ():
        more = min(int(wish[j]), free // max(int(view.width[j]), 1))
        speed = view.rates[0, view.curve[j], workers[j] : workers[j] + more + 1]
        more = int(np.searchsorted(speed, speed[-1])) if len(speed) else 0
        workers[j] += more
        free -= more * int(view.width[j])
    return free


def hand_out(view: Snapshot, jobs: Jobs, workers: IntArray, free: int, market: Market) -> FloatArray:
    """Step 5: the free room to whoever gains most; the worth of each job's last worker. `workers` is written."""
    last = np.zeros(len(view))
    _spend(view, jobs, workers, free, market, np.ones(len(view), np.bool_), last)
    if view.resize_s.any():
        _settle(view, jobs, workers, market, last)
    return last


def _spend(
    view: Snapshot, jobs: Jobs, workers: IntArray, free: int, market: Market, who: BoolArray, last: FloatArray
) -> None:
    if free <= 0:
        return
    grows = np.flatnonzero(who & (workers > 0) & (workers < view.max_workers))
    if not len(grows) or free < int(view.width[grows].min()):
        return
    width, p = np.maximum(view.width[grows], 1), market.p
    scale = (view.min_workers[grows] * width / GPU) ** p
    worth = _worth(jobs.left * (view.min_workers * np.maximum(view.width, 1) / GPU) ** p, p)[grows]
    vertex = market.curves.workers[view.curve[grows]]
    slope = market.curves.slope[view.curve[grows]] * (worth * scale / jobs.unit[grows] * GPU / width)[:, None]
    low = np.maximum(vertex[:, :-1], workers[grows, None])
    high = np.minimum(vertex[:, 1:], view.max_workers[grows, None])
    there = np.clip(view.workers[grows, None], low, np.maximum(low, high))
    stays = 1 + view.resize_s[grows] / max(market.between_s, 1.0)
    count = np.concatenate((there - low, high - there), axis=1).ravel()
    value = np.concatenate((slope * stays[:, None], slope), axis=1).ravel()
    piece = np.flatnonzero((count > 0) & (value > 0))
    piece = piece[np.argsort(-value[piece], kind="stable")]
    owner = piece // (2 * slope.shape[1])
    taken = _take(count[piece], width[owner], free)
    np.add.at(workers, grows[owner], taken)
    got = taken > 0
    last[grows[owner[got]]] = value[piece[got]]


def _settle(view: Snapshot, jobs: Jobs, workers: IntArray, market: Market, last: FloatArray) -> None:
    """Take back what does not pay. `workers` and `last` are written."""
    now = view.workers
    stays = (now >= np.maximum(view.min_workers, 1)) & (now <= view.max_workers) & (workers > 0)
    idle = stays & (workers > now)
    idle[idle] = _gain_s(view, jobs, workers, market)[idle] <= view.resize_s[idle]
    if not idle.any():
        return
    workers[idle] = now[idle]
    free = view.total_milli - int(((workers * view.width) + view.fixed_milli)[workers > 0].sum())
    for j in np.flatnonzero(stays & (workers < now)).tolist():
        more = int((now[j] - workers[j]) * view.width[j])
        if more <= free:
            workers[j] = now[j]
            free -= more
    _spend(view, jobs, workers, free, market, workers != now, last)


def _gain_s(view: Snapshot, jobs: Jobs, workers: IntArray, market: Market) -> FloatArray:
    """Seconds that each job wins by its new size, to its end or to the next decision."""
    before, after = np.maximum(view.rate(view.workers), 1e-12), np.maximum(view.rate(workers), 1e-12)
    holds_s = np.minimum(jobs.left * jobs.unit / after, market.between_s)
    return holds_s * (after / before - 1)


def _worth(left: FloatArray, p: float) -> FloatArray:
    """Worth of progress by rank: 1 for the job with the most left, growing like rank^p."""
    rank = np.empty(len(left))
    rank[np.lexsort((np.arange(len(left)), -left))] = np.arange(1, len(left) + 1)
    c = 1 / (1 - p)
    worth: FloatArray = rank * (1 - ((rank - 1) / rank) ** c) ** (1 / c)
    return worth


def _take(count: IntArray, width: IntArray, free: int) -> IntArray:
    """As many workers of each piece, in this order, as the room allows."""
    total = np.cumsum(count * width)
    whole = int(np.searchsorted(total, free, side="right"))
    taken = np.where(np.arange(len(count)) < whole, count, 0)
    free -= int(total[whole - 1]) if whole else 0
    slimmest = int(width.min()) if len(width) else 1
    for i in range(whole, len(count)):
        if free < slimmest:
            break
        taken[i] = min(int(count[i]), free // int(width[i]))
        free -= int(taken[i]) * int(width[i])
    return taken
