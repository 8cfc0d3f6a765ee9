"""Whose work is given up for a job of strictly higher priority: as little as possible, and never for nothing.

Of the jobs that may be stopped the least urgent go first, then those that lose least. Nobody is stopped who need not
be: the urgent job finds a place with them gone, on nodes where nodes are known, and would find none with fewer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core import services
from stretto.core.decision import Decision
from stretto.core.placement import pack
from stretto.core.reasons import Reason
from stretto.core.snapshot import BoolArray, IntArray, Snapshot


class Situation(NamedTuple):
    """What holds if nobody is stopped."""

    view: Snapshot
    places: Snapshot
    """The same jobs as placements see them."""
    first: Decision
    """What the policy would do if nobody were pinned."""
    decision: Decision
    keep: IntArray
    """Workers of those who stay as they are."""


def victims(now: Situation, urgent: int, stoppable: BoolArray) -> BoolArray:
    """As few of the less urgent as make room for this one; nobody if all of them do not."""
    view = now.view
    assert view.lost_s is not None
    less = stoppable & (view.priority < view.priority[urgent]) & (view.pool == now.first.pool[urgent])
    some = np.flatnonzero(less)
    order: list[int] = some[np.lexsort((view.job[some], view.lost_s[some], view.priority[some]))].tolist()
    chosen = np.zeros(len(view), np.bool_)
    for size in _sizes(now, urgent):
        room = _Room(now, urgent, size)
        enough = bisect_left(range(len(order) + 1), True, key=lambda count: room.holds(order[:count]))
        if enough <= len(order):
            chosen[room.pruned(order[:enough])] = True
            break
    return chosen


def _sizes(now: Situation, urgent: int) -> Sequence[int]:
    """What it would be helped by, best first: every replica if it is a service, otherwise its minimum alone."""
    view = now.view
    if not view.is_service[urgent]:
        return (int(view.min_workers[urgent]),)
    has, low = int(now.decision.workers[urgent]), int(view.min_workers[urgent])
    return range(int(now.first.workers[urgent]), max(has, low - 1), -1)


class _Room:
    """Whether there is room for so many workers of a job if others stop."""

    def __init__(self, now: Situation, urgent: int, size: int) -> None:
        self._now, self._urgent, self._size = now, urgent, size
        view, decision = now.view, now.decision
        self._before = np.where(now.keep > 0, now.keep, decision.workers)
        self._pool = np.where(now.keep > 0, np.maximum(view.pool, 0), decision.pool)
        self._pool[urgent] = now.first.pool[urgent]
        # Who keeps its progress and is less urgent gives way, and can be put elsewhere.
        self._firm = (now.keep > 0) | (view.priority >= view.priority[urgent])

    def holds(self, stopped: Sequence[int]) -> bool:
        workers = self._before.copy()
        workers[list(stopped)] = 0
        workers[self._urgent] = self._size
        view, pool = self._now.view, int(self._pool[self._urgent])
        if view.used_milli(workers, self._pool)[pool] > view.capacity[pool]:
            return False
        placed = self._placed(workers)
        return placed is None or int(placed.sum()) >= self._size

    def pruned(self, stopped: Sequence[int]) -> list[int]:
        """Those of them whom it really needs to stop. On other nodes than it gets nobody has to."""
        workers = self._before.copy()
        workers[list(stopped)] = 0
        workers[self._urgent] = self._size
        placed = self._placed(workers)
        chosen = list(stopped)
        if placed is not None:
            near = [j for j in chosen if self._now.places.placed[j, placed > 0].any()]
            chosen = near if self.holds(near) else chosen
        for j in reversed(chosen):
            others = [i for i in chosen if i != j]
            chosen = others if self.holds(others) else chosen
        return chosen

    def _placed(self, workers: IntArray) -> IntArray | None:
        firm = self._firm.copy()
        firm[self._urgent] = True
        return placed_beside(self._now.places, np.where(firm, workers, 0), self._pool, self._urgent)


def placed_beside(places: Snapshot, workers: IntArray, pool: IntArray, job: int) -> IntArray | None:
    """Workers by node that a job gets if those who run stay where they are; None where nodes are not told apart."""
    if places.placed.shape[1] != len(places.nodes.name):
        return None
    some = workers > 0
    found = pack.place(services.only(places, some), workers[some], pool[some])
    row: IntArray = found[int(some[:job].sum())]
    return row


def has_places(places: Snapshot, job: int, pool: int) -> bool:
    """Whether the nodes of a pool have places for its minimum if it is alone; True where they are not told apart."""
    alone = services.only(places, np.arange(len(places)) == job)
    alone = msgspec.structs.replace(alone, workers=alone.workers * 0, placed=alone.placed * 0)
    least = alone.min_workers
    row = placed_beside(alone, least, least * 0 + pool, 0)
    return row is None or int(row.sum()) >= least[0]


def in_pieces(view: Snapshot, wished: IntArray, got: IntArray) -> BoolArray:
    """Who waits and was given room that is in pieces, and might have it in one if less urgent jobs stopped."""
    stoppable = view.pinned if view.preemptible is None else view.pinned & view.preemptible
    lowest = view.priority[stoppable].min(initial=np.iinfo(np.int64).max)
    found: BoolArray = (view.workers == 0) & (wished > 0) & (got == 0) & (view.priority > lowest)
    return found


def is_served(view: Snapshot, urgent: int, tried: Decision, before: Decision, stopped: BoolArray, pieces: bool) -> bool:
    """Whether it gets more by these stops, and the room really goes to more urgent jobs: in its pool they get more than
    the others give up and was free. Otherwise somebody would lose work for an equal to whom the policy gives theirs.
    `pieces`: what was given to it before, and is free, is of no use to it."""
    pool = int(tried.pool[urgent])
    holds = _milli(view, np.where(view.pool == pool, view.workers, 0))[~stopped]
    gets = _milli(view, np.where(tried.pool == pool, tried.workers, 0))[~stopped]
    urgently = (view.priority > view.priority[stopped].max())[~stopped]
    free = int(view.capacity[pool] - view.used_milli(view.workers, np.maximum(view.pool, 0))[pool])
    spare = (0 if pieces else free) + int(np.maximum(holds - gets, 0).sum())
    more = int(np.maximum(gets - holds, 0)[urgently].sum())
    return bool(tried.workers[urgent] > (0 if pieces else before.workers[urgent])) and more > spare


def _milli(view: Snapshot, workers: IntArray) -> IntArray:
    taken: IntArray = workers * view.width + np.where(workers > 0, view.fixed_milli, 0)
    return taken


def in_vain(view: Snapshot, reason: IntArray, about: IntArray, wished: IntArray, got: IntArray) -> BoolArray:
    """Who would be stopped for a more urgent job (`about`) that has no place all the same. `wished`: the workers that
    were decided; `got`: those for which there are places."""
    vain = np.zeros(len(view), np.bool_)
    for j in np.flatnonzero((reason == Reason.PREEMPTED_URGENT) & (view.workers > 0) & (got == 0)).tolist():
        urgent = int(np.searchsorted(view.job, about[j, 0]))
        has = int(view.workers[urgent]) if view.is_service[urgent] else 0
        vain[j] = got[urgent] < wished[urgent] and got[urgent] <= has
    return vain


def sparing(view: Snapshot, some: BoolArray) -> Snapshot:
    """The same if these jobs may not be stopped."""
    preemptible = np.ones(len(view), np.bool_) if view.preemptible is None else view.preemptible
    return msgspec.structs.replace(view, preemptible=preemptible & ~some)
