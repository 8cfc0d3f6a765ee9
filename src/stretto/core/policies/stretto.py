"""Our own policy: start everybody, hand out the rest by marginal benefit, let nobody fall behind.

Resizing costs milliseconds, so it is done whenever it pays. One decision, in steps:

1. **How long is left?** The known remaining work, or, for unknown lengths, what the jobs submitted around it needed
   (`estimate.siblings`). Everything is counted in seconds on the job's minimum of workers.
2. **Who is falling behind?** A fair world, in which everybody always holds an equal share, is kept beside the real one
   (`fairshare`). A job that could no longer end within `fairness` times its completion time there is *late*.
3. **Start.** Minimums in order of priority; late jobs first; then the smallest area (time left × GPUs) first; whoever
   does not fit is skipped. A running job is only displaced if that pays for its restart.
4. **Catch up.** Late jobs are raised to their fair share.
5. **Hand out the rest.** The worth of progress of the i-th largest of the jobs is v(i) = (i^c − (i−1)^c)^(1/c),
   c = 1/(1−p): the exact derivative of the total completion time under heSRPT for speed-ups n^p. A worker of job j is
   worth v(j) × its gain in speed; the best ones are taken first, on concave hulls. A worker that is already there is
   worth a little more, by what a resize costs: so nothing moves for a gain smaller than its cost.

See docs/design/stretto-policy.md for the experiments that led here.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core import fairshare, marginal
from stretto.core.decision import Decision, Memory
from stretto.core.estimate import siblings
from stretto.core.fairshare import FairWorld
from stretto.core.hull import Hulls, hulls
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    p: float = 0.3
    """How far small jobs are preferred: 0 not at all, near 1 entirely."""
    fairness: float = 1.3
    """Completion time, as a multiple of that under equal sharing, at which a job goes first."""
    patience: float = 0.3
    """With unknown lengths a running job gives way only to one whose outlook is this much shorter."""
    quantum_s: float = 60.0
    """Shortest time between two looks at who is late."""


class _Recall(msgspec.Struct, frozen=True):
    """What is remembered from decision to decision."""

    world: FairWorld
    table: FloatArray
    curves: Hulls
    """Hulls of `table`: made again only when the snapshot brings another table."""
    between_s: float
    """Typical time between two decisions."""


class _Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """Step 1 and 2: what is known or believed of every job. Times in seconds on its minimum of workers."""

    unit: FloatArray
    """Steps/s on the minimum."""
    left: FloatArray
    key: FloatArray
    """Area left, for the order of starts."""
    late: BoolArray
    behind: FloatArray
    """Expected completion time as a multiple of that under equal sharing."""
    until_late_s: float
    share: FloatArray


@policy(
    "stretto",
    traits=Traits(
        work_conserving=True, preempts="any", elastic=True, starvation_free=True, uses=frozenset({"curve", "history"})
    ),
    options=Options,
)
def stretto(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Everybody starts at once; the rest goes where it shortens completion most; nobody falls behind a fair share."""
    recall: _Recall | None = memory
    if recall is None or recall.table is not view.rates:
        world = recall.world if recall else fairshare.empty(view.now_s)
        recall = _Recall(world, view.rates, hulls(view.rates[0]), recall.between_s if recall else 600.0)
    world, jobs = _judge(view, recall.world, options)
    workers, left = _start(view, jobs)
    free = view.total_milli - int((workers * view.width + np.where(workers > 0, view.fixed_milli, 0)).sum())
    free = _catch_up(view, jobs, workers, free)
    last = _hand_out(view, jobs, workers, free, recall, options)
    pace = view.rate(workers) / jobs.unit
    passed = view.now_s - recall.world.at_s
    between = recall.between_s + 0.1 * (passed - recall.between_s) if passed > 0 else recall.between_s
    wake = view.now_s + max(options.quantum_s, jobs.until_late_s)
    recall = _Recall(fairshare.paced(world, view, pace), view.rates, recall.curves, between)
    return _explain(view, jobs, workers, left, last, recall, wake, options)


def _judge(view: Snapshot, before: FairWorld, options: Options) -> tuple[FairWorld, _Jobs]:
    unit = np.maximum(view.rate(view.min_workers), 1e-12)
    done, left = view.done / unit, view.remaining / unit
    unknown = np.isnan(left)
    least = done + left
    if unknown.any():
        seen = siblings.outlook(view, done)
        left = np.where(unknown, seen.left, left)
        # Unless jobs must wait for each other, being careful costs nothing: expect the job to end any moment.
        crowded = int(marginal.smallest_need(view).sum()) > view.total_milli
        least = np.where(unknown, seen.least if crowded else done, least)
    world = fairshare.advance(before, view, done, np.where(unknown, np.nan, least))
    at = fairshare.positions(world, view)
    share, speed = world.share[at], world.speed[at]
    pace = np.maximum(1.0, view.rate(np.maximum(view.min_workers, share.astype(np.int64))) / unit)
    rest_s = np.maximum(least - done, 0.0) / pace
    # Where the fair world would be when the job ends, if it ran from now on, against where it should be.
    age_s = view.now_s - view.submit_s
    ended = np.isfinite(world.ended_s[at])
    reached = np.where(ended, (age_s + rest_s) / np.maximum(world.ended_s[at] - view.submit_s, 1e-9), 0.0)
    running = (world.progress[at] + speed * rest_s) / np.maximum(least, 1e-9)
    behind = np.where(ended, reached, running)
    late = (behind >= options.fairness) & (world.progress[at] > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        grows = np.where(ended, 1 / (world.ended_s[at] - view.submit_s), speed / least)
        until = np.where(~late & (grows > 0), (options.fairness - behind) / grows, np.inf)
    soon = 0.0 if late.any() else float(until.min(initial=math.inf))
    held = view.workers > 0
    patient = np.where(unknown, left * options.patience, np.maximum(left - view.start_s, 0.0))
    area: FloatArray = np.where(held, patient, left) * (marginal.smallest_need(view) / GPU)
    return world, _Jobs(unit=unit, left=left, key=area, late=late, behind=behind, until_late_s=soon, share=share)


def _start(view: Snapshot, jobs: _Jobs) -> tuple[IntArray, FloatArray]:
    """Minimums in order, whoever fits; and the room that was left at each job's turn."""
    need = marginal.smallest_need(view)
    order = np.lexsort((view.job, jobs.key, np.where(jobs.late, -jobs.behind, 0.0), -view.priority))
    wide = need[order]
    total = np.cumsum(wide)
    taken = np.zeros(len(view), np.bool_)
    room = view.total_milli - total + wide
    fit = int(np.searchsorted(total, view.total_milli, side="right"))
    taken[:fit] = True
    if fit < len(order):
        free = view.total_milli - (int(total[fit - 1]) if fit else 0)
        narrowest = np.minimum.accumulate(wide[::-1])[::-1].tolist()
        needs = wide.tolist()
        for i in range(fit, len(needs)):
            room[i] = free
            if narrowest[i] > free:
                room[i:] = free
                break
            if needs[i] <= free:
                free -= needs[i]
                taken[i] = True
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    workers[order] = np.where(taken, view.min_workers[order], 0)
    left[order] = room
    return workers, left


def _catch_up(view: Snapshot, jobs: _Jobs, workers: IntArray, free: int) -> int:
    """Raise late jobs to their fair share, the latest first; what is left then. `workers` is written."""
    fair = np.minimum(view.max_workers, np.ceil(jobs.share - 1e-9).astype(np.int64))
    wish = np.where(jobs.late & (workers > 0), np.maximum(fair - workers, 0), 0)
    for j in np.lexsort((view.job, -jobs.behind))[: int(jobs.late.sum())].tolist() if wish.any() else ():
        more = min(int(wish[j]), free // max(int(view.width[j]), 1))
        workers[j] += more
        free -= more * int(view.width[j])
    return free


def _hand_out(
    view: Snapshot, jobs: _Jobs, workers: IntArray, free: int, recall: _Recall, options: Options
) -> FloatArray:
    """Give the free room to whoever gains most; the worth of each job's last worker. `workers` is written."""
    last = np.zeros(len(view))
    grows = np.flatnonzero((workers > 0) & (workers < view.max_workers))
    if not len(grows) or free < int(view.width[grows].min()):
        return last
    width = np.maximum(view.width[grows], 1)
    scale = (view.min_workers[grows] * width / GPU) ** options.p
    worth = _worth(jobs.left * (view.min_workers * np.maximum(view.width, 1) / GPU) ** options.p, options.p)[grows]
    vertex = recall.curves.workers[view.curve[grows]]
    slope = recall.curves.slope[view.curve[grows]] * (worth * scale / jobs.unit[grows] * GPU / width)[:, None]
    low = np.maximum(vertex[:, :-1], workers[grows, None])
    high = np.minimum(vertex[:, 1:], view.max_workers[grows, None])
    there = np.clip(view.workers[grows, None], low, np.maximum(low, high))
    stays = 1 + np.minimum(1.0, view.resize_s[grows] / max(recall.between_s, 1.0))
    count = np.concatenate((there - low, high - there), axis=1).ravel()
    value = np.concatenate((slope * stays[:, None], slope), axis=1).ravel()
    piece = np.flatnonzero((count > 0) & (value > 0))
    piece = piece[np.argsort(-value[piece], kind="stable")]
    owner = piece // (2 * slope.shape[1])
    taken = _take(count[piece], width[owner], free)
    np.add.at(workers, grows[owner], taken)
    got = taken > 0
    last[grows[owner[got]]] = value[piece[got]]
    return last


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


def _explain(
    view: Snapshot,
    jobs: _Jobs,
    workers: IntArray,
    left: FloatArray,
    last: FloatArray,
    recall: _Recall,
    wake_s: float,
    options: Options,
) -> Decision:
    decision = marginal.decision(view, workers, left, last, last, memory=recall, wake_s=wake_s)
    first = jobs.late & (workers > 0)
    reason, detail = decision.reason.copy(), decision.detail.copy()
    reason[first] = Reason.BEHIND_FAIR_SHARE
    detail[first, 0], detail[first, 1] = jobs.behind[first], options.fairness
    return msgspec.structs.replace(decision, reason=reason, detail=detail)
