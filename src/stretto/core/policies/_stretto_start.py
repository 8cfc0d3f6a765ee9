"""Who runs: step 3 of the policy `stretto`, with every start and stop weighed against what it costs.

Minimums are given in one order, and whoever does not fit is skipped. What a restart costs enters in two places:

- **A shorter job displaces a longer one** only if that pays. The displaced job ends later by the newcomer's whole time
  and by both starts, and its own restart keeps GPUs from everybody who waits. With unknown lengths the newcomer's
  outlook must also be `patience` times shorter: a guess is no reason to stop anybody.
- **A late job displaces others** only after their *stint*, many times what a stop costs. So however many are
  late, starts take a small part of the time, and no two jobs exchange places. With unknown lengths a stint holds
  against shorter outlooks, too. There is none that is shorter than the quantum: where starts are nearly free,
  nothing changes. A late job that waited for `_TURNS` stints and finds no room
  has a *reservation*: who starts past it has no stint against it. So nobody waits for ever behind trickling stints.

Late jobs are ranked by how late they are in steps of `_STEP`, not by every per cent: among those of one rank the
shortest goes first, and of those whose length nobody knows the oldest.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core.policies._stretto_jobs import Jobs, Late, places, stint_s, stop_s
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

_TURNS = 10.0
_STEP = 1.5


class Stints(msgspec.Struct, frozen=True):
    """Who is not to be stopped for a late job yet. Columns by job number, ascending."""

    job: IntArray
    since_s: FloatArray
    """When each job was started."""
    open: BoolArray
    """Who started past the job with the reservation."""
    reserved: int = -1
    """The job with the reservation; -1: none."""

    def of(self, view: Snapshot) -> Stints:
        """For the jobs of the snapshot; since their last change for those that were never seen."""
        at, known = places(self.job, view)
        if not known.any():
            return Stints(view.job, view.changed_s, np.zeros(len(view), np.bool_))
        since_s = np.where(known, self.since_s[at], view.changed_s)
        return Stints(view.job, since_s, known & self.open[at], self.reserved)


class Started(msgspec.Struct, frozen=True):
    """Who holds its minimum, and what was seen on the way."""

    workers: IntArray
    left: FloatArray
    """Milli-GPU that were left at each job's turn."""
    free: int
    """Milli-GPU that are left at the end."""
    stints: Stints


def start(view: Snapshot, jobs: Jobs, late: Late | None, stints: Stints, patience: float, quantum_s: float) -> Started:
    """Minimums in order, whoever fits."""
    need, stints = jobs.need, stints.of(view)
    free = view.total_milli - int(need.sum())
    if free >= 0:
        # The order does not matter: each finds what the minimums of the others leave.
        workers = view.min_workers.copy()
        return Started(workers, (free + need).astype(np.float64), free, _next(view, workers, stints))
    guarded = (view.workers > 0) & (view.now_s - stints.since_s < stint_s(stop_s(view), quantum_s))
    order = _order(view, jobs, late, guarded, stints, patience)
    size, room, free = _packed(need[order], view.min_workers[order], view.total_milli)
    workers, left = np.empty(len(view), np.int64), np.empty(len(view))
    workers[order], left[order] = size, room
    following = _next(view, workers, stints)
    if late is not None and guarded.any():
        long = view.now_s - view.changed_s > _TURNS * stint_s(view.start_s, quantum_s)
        reserved, opened = _reserve(view, late.late & long, order, size, stints)
        following = Stints(view.job, following.since_s, opened, reserved)
    return Started(workers, left, free, following)


def _order(
    view: Snapshot, jobs: Jobs, late: Late | None, guarded: BoolArray, stints: Stints, patience: float
) -> IntArray:
    outlook = np.where(view.workers > 0, _held(view, jobs, patience), jobs.left)
    keys: list[IntArray | FloatArray] = [view.job, outlook]
    if late is not None:
        if jobs.unknown is not None:
            keys[1] = np.where(late.late & jobs.unknown, 0.0, outlook)
        keys.append(-np.floor(np.log(np.maximum(late.behind, 1e-9)) / math.log(_STEP)))
        reserved = late.late & (view.job == stints.reserved)
        keys.append(np.where(reserved, 1, np.where(guarded, np.where(stints.open, 2, 0), 3)))
    elif jobs.unknown is not None:
        keys.append(np.where(guarded & jobs.unknown, 0, 1))
    if view.priority.any():
        keys.append(-view.priority)
    return np.lexsort(keys)


def _held(view: Snapshot, jobs: Jobs, patience: float) -> FloatArray:
    """How short the outlook of a newcomer must be so that stopping this job for it pays."""
    waiting = int((view.workers == 0).sum())
    # Everybody who waits does so longer by the part of the cluster that a restart keeps busy.
    part = waiting * jobs.need / max(view.total_milli, 1)
    held = np.maximum(jobs.left - view.start_s - stop_s(view) * (1 + part), 0.0)
    if jobs.unknown is None:
        return held
    return np.where(jobs.unknown, np.minimum(held, jobs.left * patience), held)


def _packed(wide: IntArray, size: IntArray, capacity: int) -> tuple[IntArray, FloatArray, int]:
    """Columns in order: the workers of whoever fits, the room at each one's turn; and the room at the end."""
    total = np.cumsum(wide)
    fit = int(np.searchsorted(total, capacity, side="right"))
    free = capacity - (int(total[fit - 1]) if fit else 0)
    room = (capacity - total + wide).astype(np.float64)
    room[fit:] = free
    narrowest = np.minimum.accumulate(wide[fit:][::-1])[::-1].tolist()
    for i, milli in enumerate(wide[fit:].tolist(), fit):
        if narrowest[i - fit] > free:
            size[i:] = 0
            break
        room[i] = free
        if milli <= free:
            free -= milli
            room[i + 1 :] = free
        else:
            size[i] = 0
    return size, room, free


def _next(view: Snapshot, workers: IntArray, stints: Stints) -> Stints:
    """With the stints that begin now, without a reservation."""
    begins = (view.workers == 0) & (workers > 0)
    return Stints(view.job, np.where(begins, view.now_s, stints.since_s), np.zeros(len(view), np.bool_))


def _reserve(
    view: Snapshot, overdue: BoolArray, order: IntArray, size: IntArray, before: Stints
) -> tuple[int, BoolArray]:
    """The first overdue job that found no room, and who runs by having started past it."""
    opened = np.zeros(len(view), np.bool_)
    skipped = (size == 0) & overdue[order]
    if not skipped.any():
        return -1, opened
    first = int(np.argmax(skipped))
    reserved, past = int(view.job[order[first]]), order[first:]
    opened[past] = view.workers[past] == 0
    return reserved, opened | before.open if reserved == before.reserved else opened
