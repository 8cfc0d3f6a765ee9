"""From what is to what should be: the actions, in an order in which nothing starts on resources not yet released.

`settle` first weighs every resize against its cost and drops those that do not pay (hysteresis). `diff` then orders
what is left:

1. *stop* jobs that get nothing,
2. *shrink* those that get less,
3. *migrate* workers between nodes, each as soon as its target has room; the newcomer starts before the old worker
   leaves, so both are held for a moment. Where moves wait for each other in a circle, one job is split: it shrinks
   first and grows later, or, when that would take it below its minimum, is stopped and started,
4. *start* new jobs,
5. *grow* those that get more.

At no point does a node hold more than it has, and in the end everything is where it was wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import msgspec
import numpy as np

from stretto.core import services, steps
from stretto.core.decision import Decision
from stretto.core.estimate.remaining import expected_steps
from stretto.core.placement.placing import Cells
from stretto.core.placement.room import Room, shape_of, shapes_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

_SOONEST_S = 1.0
"""A change that does not pay now is not looked at again sooner."""

Nodes: TypeAlias = tuple[tuple[int, int], ...]
"""Node index and workers, in order of node."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """All workers leave."""

    job: int
    nodes: Nodes


class Shrink(msgspec.Struct, frozen=True, tag="shrink"):
    """These workers leave, the others train on."""

    job: int
    nodes: Nodes


class Migrate(msgspec.Struct, frozen=True, tag="migrate"):
    """Workers start at the target, then as many leave the source."""

    job: int
    source: int
    target: int
    workers: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    """A job without workers gets these."""

    job: int
    pool: int
    nodes: Nodes


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """These workers join."""

    job: int
    nodes: Nodes


Action: TypeAlias = Stop | Shrink | Migrate | Start | Grow


class Plan(msgspec.Struct, frozen=True):
    """What a backend carries out, in this order."""

    actions: tuple[Action, ...] = ()

    def __len__(self) -> int:
        return len(self.actions)


def diff(view: Snapshot, decision: Decision, placed_now: IntArray, placed_wanted: IntArray) -> Plan:
    """The actions that lead from one [job, node] placement to the other."""
    shape = (len(view), len(view.nodes.name))
    if placed_now.shape != shape or placed_wanted.shape != shape:
        raise ValueError(f"placements must have the shape {shape}, got {placed_now.shape} and {placed_wanted.shape}")
    if np.array_equal(placed_now, placed_wanted):
        return Plan()
    return _Planner(view, decision.pool, placed_now, placed_wanted).plan()


class _Move(msgspec.Struct):
    """Workers of one job that change nodes. `workers` falls as they go."""

    j: int
    source: int
    target: int
    workers: int


class _Planner:
    """The state while a plan is made: where everybody is after the actions so far."""

    def __init__(self, view: Snapshot, pool: IntArray, now: IntArray, wanted: IntArray) -> None:
        self.view, self.pool = view, pool
        self.at, self.wanted = now.copy(), wanted
        self.actions: list[Action] = []
        self.moves: list[_Move] = []
        # Whether a pool is right was the placement's business; here only room counts.
        anywhere = np.zeros(len(view), np.int64)
        shapes, index = shapes_of(view, anywhere)
        self.shape: list[int] = index.tolist()
        self.role = {j: len(shapes) + i for i, j in enumerate(np.flatnonzero(view.fixed_milli).tolist())}
        shapes += [shape_of(0, int(view.fixed_milli[j]), 0, 0, 0) for j in self.role]
        self.room = Room(msgspec.structs.replace(view.nodes, pool=np.zeros_like(view.nodes.pool)), shapes)

    def plan(self) -> Plan:
        changed = np.unique(np.nonzero(self.at != self.wanted)[0]).tolist()
        for j in changed:
            if self._must_stop(j):
                self._stop(j)
        for j in changed:
            if self.at[j].any():
                self._shrink(j)
        self._occupy()
        self._migrate()
        for j in changed:
            if not self.at[j].any() and self.wanted[j].any():
                self.actions.append(Start(self._number(j), int(self.pool[j]), _nodes(self.wanted[j])))
                self.at[j] = self.wanted[j]
        for j in changed:
            if (self.at[j] != self.wanted[j]).any():
                self.actions.append(Grow(self._number(j), _nodes(self.wanted[j] - self.at[j])))
                self.at[j] = self.wanted[j]
        return Plan(tuple(self.actions))

    def _number(self, j: int) -> int:
        return int(self.view.job[j])

    def _must_stop(self, j: int) -> bool:
        """Wanted nowhere, all its nodes lost, or its fixed roles would have to move."""
        if not self.at[j].any():
            return False
        alive = self.at[j] * (self.view.nodes.devices > 0)
        if not self.wanted[j].any() or not alive.any():
            return True
        return j in self.role and int(np.argmax(self.at[j] > 0)) != int(np.argmax(self.wanted[j] > 0))

    def _stop(self, j: int) -> None:
        self.actions.append(Stop(self._number(j), _nodes(self.at[j])))
        self.at[j] = 0

    def _shrink(self, j: int) -> None:
        """Take away what moves nowhere: workers of lost nodes, and as many as the job gets fewer."""
        leaving = np.maximum(self.at[j] - self.wanted[j], 0)
        coming = np.maximum(self.wanted[j] - self.at[j], 0)
        gone = np.where(self.view.nodes.devices > 0, 0, leaving)
        surplus = int(leaving.sum() - coming.sum() - gone.sum())
        for node, count in sorted(_nodes(leaving - gone), key=lambda piece: piece[1]):
            take = min(max(surplus, 0), count)
            gone[node] += take
            surplus -= take
        if gone.any():
            self.actions.append(Shrink(self._number(j), _nodes(gone)))
            self.at[j] -= gone
        self._plan_moves(j, leaving - gone, coming)

    def _plan_moves(self, j: int, leaving: IntArray, coming: IntArray) -> None:
        targets = [[node, count] for node, count in _nodes(coming)]
        for source, count in _nodes(leaving):
            while count and targets:
                several = min(count, targets[0][1])
                self.moves.append(_Move(j, source, targets[0][0], several))
                count -= several
                targets[0][1] -= several
                if not targets[0][1]:
                    targets.pop(0)

    def _occupy(self) -> None:
        """Fill the room with what is there now. Large shares first, as everywhere."""
        if not self.moves:
            return
        cells = Cells.of(self.at)
        wide_first = np.lexsort((cells.node, cells.job, -self.view.width[cells.job]))
        for j, node, count in zip(*(column[wide_first].tolist() for column in cells), strict=True):
            self.room.take(node, self.shape[j], count)
        for j, role in self.role.items():
            if self.at[j].any():
                self.room.take(int(np.argmax(self.at[j] > 0)), role, 1)

    def _migrate(self) -> None:
        while self.moves:
            if not sum([self._try(move) for move in self.moves]):
                self._split()
            self.moves = [move for move in self.moves if move.workers]

    def _try(self, move: _Move) -> bool:
        """Move as many of these workers as the target has room for."""
        got = self.room.take(move.target, self.shape[move.j], move.workers)
        if not got:
            return False
        self.actions.append(Migrate(self._number(move.j), move.source, move.target, got))
        self._leave(move.j, move.source, got)
        self.at[move.j, move.target] += got
        move.workers -= got
        return True

    def _leave(self, j: int, node: int, count: int) -> None:
        self.room.give(node, self.shape[j], count)
        self.at[j, node] -= count

    def _split(self) -> None:
        """Break a circle: release the workers of one move and let them come back at the end."""
        for move in sorted(self.moves, key=lambda move: (move.workers, move.j, move.source)):
            if self.at[move.j].sum() - move.workers >= max(int(self.view.min_workers[move.j]), 1):
                self.actions.append(Shrink(self._number(move.j), ((move.source, move.workers),)))
                self._leave(move.j, move.source, move.workers)
                move.workers = 0
                return
        j = min(self.moves, key=lambda move: (int(self.at[move.j].sum()), move.j)).j
        if j in self.role:
            self.room.give(int(np.argmax(self.at[j] > 0)), self.role[j], 1)
        for node, count in _nodes(self.at[j]):
            self.room.give(node, self.shape[j], count)
        self._stop(j)
        for move in self.moves:
            if move.j == j:
                move.workers = 0


def _nodes(row: IntArray) -> Nodes:
    return tuple((node, int(row[node])) for node in np.flatnonzero(row).tolist())


# Hysteresis.


def worthwhile(view: Snapshot, workers: IntArray, pool: IntArray | None = None) -> BoolArray:
    """Whether each job's change pays: it ends sooner by more than the change costs it.

    Starts and stops are not resizes, and what does not change costs nothing: these always do. A job of unknown length
    is expected to last as `estimate.remaining.expected_steps` says.
    """
    where = np.maximum(view.pool, 0) if pool is None else pool
    resized = (view.workers > 0) & (workers > 0) & ((workers != view.workers) | (where != view.pool))
    gain: BoolArray = ~resized | (gain_s(view, workers, where) > view.resize_s)
    return gain


def gain_s(view: Snapshot, workers: IntArray, pool: IntArray) -> FloatArray:
    """Seconds that each running job would end sooner, not counting what the change costs. Never nan."""
    steps = expected_steps(view)
    top = view.rates.shape[2] - 1
    before = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(view.workers, top)]
    after = view.rates[pool, view.curve, np.minimum(workers, top)]
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = steps / before - steps / after
    # No speed before: any is a gain without end. None after: a loss without end.
    return np.where(np.isnan(gain), 0.0, gain)


def settle(view: Snapshot, decision: Decision) -> Decision:
    """The decision without the resizes that do not pay.

    A job whose growth or change of pool gains less than it costs stays as it is. A job that was to shrink stays as it
    is while nobody else is given the room; so does one that was to be stopped but ends within the time a resize takes.
    Stretching room that others were given is never done: the result fits wherever the decision did.
    """
    runs = view.workers > 0
    changed = runs & ((decision.workers != view.workers) | ((decision.workers > 0) & (decision.pool != view.pool)))
    if not changed.any():
        return decision
    gain, left_s = np.zeros(len(view)), np.full(len(view), np.inf)
    few = services.only(view, changed)
    gain[changed] = gain_s(few, decision.workers[changed], decision.pool[changed])
    left_s[changed] = _left_s(few)
    # The size of a service is its load's business: neither speed nor an end is to be gained by it.
    loses = changed & (decision.workers > 0) & ~(gain > view.resize_s) & ~view.is_service
    # A guess at a length is too little to keep others waiting for.
    nearly = np.isfinite(view.remaining) & (left_s <= np.where(changed, view.resize_s, -1.0))
    # Who has another size than it may have by now, because it was scaled, cannot keep it.
    allowed = (view.workers >= view.min_workers) & (view.workers <= view.max_workers)
    if view.step is not None:
        allowed &= steps.possible(view, view.workers) == view.workers
    workers, pool = decision.workers.copy(), decision.pool.copy()
    reason, detail = decision.reason.copy(), decision.detail.copy()
    free = view.capacity - view.used_milli(workers, pool)
    for j in _kept_first(view, decision, (loses | nearly) & allowed):
        back = np.zeros(len(free), np.int64)
        if workers[j]:
            back[pool[j]] = workers[j] * view.width[j] + view.fixed_milli[j]
        back[view.pool[j]] -= view.workers[j] * view.width[j] + view.fixed_milli[j]
        if (free + back >= 0).all():
            free = free + back
            workers[j], pool[j] = view.workers[j], view.pool[j]
            reason[j] = Reason.NEARLY_DONE if nearly[j] else Reason.NOT_WORTH_RESIZE
            detail[j] = (left_s[j], 0.0) if nearly[j] else (gain[j], view.resize_s[j])
    # Who has not said how long it is may turn out long: it is thought of again when it has run twice as long.
    unknown = (reason == Reason.NOT_WORTH_RESIZE) & changed & np.isnan(view.remaining)
    again_s = view.now_s + np.maximum(view.ran_s[unknown], _SOONEST_S).min(initial=np.inf)
    return msgspec.structs.replace(
        decision, workers=workers, pool=pool, reason=reason, detail=detail, wake_s=min(decision.wake_s, float(again_s))
    )


def _left_s(view: Snapshot) -> FloatArray:
    """Seconds to the end at the present size."""
    top = view.rates.shape[2] - 1
    rate = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(view.workers, top)]
    left: FloatArray = np.divide(expected_steps(view), rate, out=np.full(len(view), np.inf), where=rate > 0)
    return left


def _kept_first(view: Snapshot, decision: Decision, candidates: BoolArray) -> Iterable[int]:
    """Jobs that may stay as they are: first those that give room back by it, then in order of number."""
    grows = (decision.workers > view.workers) & (decision.pool == view.pool)
    order: list[int] = np.lexsort((view.job, ~grows)).tolist()
    return [j for j in order if candidates[j]]
