"""Progress is not given away: jobs that would lose their work keep what they have, whatever a policy wants.

A job is *pinned* while a stop would lose more work than two starts cost (`Snapshot.pinned`). A policy need not know:

1. It is asked about everybody. If it leaves the pinned jobs as they are, its answer holds.
2. Otherwise it is asked once more, about the others and the room that the pinned jobs leave; what it remembers of the
   first answer is kept, and so is whom it rejected. So nobody is stopped, moved or resized for an equal.
3. Somebody of strictly higher priority who is left out by that may stop pinned jobs that are preemptible: see
   `preempting`.
4. A job that keeps its progress and yet is not preemptible is never stopped, in neither answer: it keeps its minimum.

Whoever the policy wanted to start and who is kept from it by pinned jobs is told so, and is remembered: see
`reservations`, which see to it that nobody starves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core import asking, preempting, reservations, services
from stretto.core.decision import Decision, Memory
from stretto.core.placement.room import shape_of
from stretto.core.policy import Policy
from stretto.core.preempting import Situation
from stretto.core.reasons import Reason
from stretto.core.reservations import Blocked, Held, Reservation, guarded
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Nodes, Snapshot

_NAMED = 3
"""Jobs that a sentence names at most; the next column says how many more there are."""


class Waiting(NamedTuple):
    """Who was kept waiting so far, and after how long a reservation is made."""

    blocked: Blocked
    reserve_after_s: float
    in_pieces: BoolArray
    """Who has just been given room that is in pieces, though it is more urgent than somebody who holds some."""


class Answer(NamedTuple):
    """A decision that takes no work from anybody who may keep it."""

    decision: Decision
    kept: BoolArray
    """Whose size and place must not change."""
    about: IntArray
    """[job, 4] the numbers of the jobs that the reason names (-1: none), and how many more it is about."""
    wanted: BoolArray
    """Whom the policy would have started if nobody were pinned."""
    blocked: Blocked
    """Who was kept waiting so far, with what is promised now."""


def ask(policy: Policy, view: Snapshot, places: Snapshot, memory: Memory, waiting: Waiting, when: str) -> Answer:
    """What the policy says, without what it must not do. `places`: the same jobs as placements see them."""
    first = asking.ask(policy, view, memory, when)
    nobody, about = np.zeros(len(view), np.bool_), _about_nobody(view)
    wanted = (view.workers == 0) & (first.workers > 0)
    blocked = waiting.blocked
    if view.lost_s is None:
        return Answer(first, nobody, about, wanted, blocked)
    pinned = view.pinned | reservations.settling(view, blocked)
    crowded, room = reservations.crowded_out(view), reservations.room_beside_services(view)

    @cache
    def pools_of(job: int) -> list[int]:
        return [pool for pool in np.flatnonzero(room[:, job]).tolist() if preempting.has_places(places, job, pool)]

    def reservation(blocked: Blocked) -> Reservation | None:
        return reservations.made(view, first, blocked, waiting.reserve_after_s, crowded, pools_of)

    blocked = reservations.without_lost(view, blocked, pools_of)
    reserved = reservation(blocked)
    following = None
    if reserved is not None:
        blocked = reservations.with_promise(view, blocked, reserved)
        late = {number: wait for number, wait in blocked.items() if number != view.job[reserved.job]}
        following = reservation(late)
    held = reservations.held_back(view, first, reserved)
    robbed = (pinned & _changes(view, first)) | (guarded(view) & _stops(view, first))
    passed_over = reserved is not None and not first.workers[reserved.job]
    holds = Answer(first, pinned, about, wanted, blocked)
    is_robbed = bool((robbed | (held.now & wanted)).any()) or passed_over
    if not is_robbed and not waiting.in_pieces.any():
        return holds
    question = _Question(policy, view, places, memory, first, pinned, held, waiting.in_pieces, when)
    answer = question.answer(reserved, following)._replace(blocked=blocked)
    return answer if is_robbed or (answer.decision.reason == Reason.PREEMPTED_URGENT).any() else holds


class _Question:
    """The second question: about those who are not kept, and the room that is left to them."""

    def __init__(
        self,
        policy: Policy,
        view: Snapshot,
        places: Snapshot,
        memory: Memory,
        first: Decision,
        pinned: BoolArray,
        held: Held,
        in_pieces: BoolArray,
        when: str,
    ) -> None:
        self._policy, self._view, self._memory, self._first, self._when = policy, view, memory, first, when
        self._places, self._pinned, self._held, self._in_pieces = places, pinned, held, in_pieces
        self._pool = np.where(view.workers > 0, view.pool, first.pool)
        self._keep = _within_capacity(view, np.where(pinned, view.workers, 0), self._pool)
        """Workers of those who are not asked about, in their pools."""
        self._reserves = False
        self._about = _about_nobody(view)

    def answer(self, reserved: Reservation | None, following: Reservation | None) -> Answer:
        """`following`: the reservation that holds once the first one is used."""
        view = self._view
        victims = np.zeros(len(view), np.bool_)
        self._reserves = reserved is not None
        decision = self._ask(victims)
        if reserved is not None and not reserved.in_pieces:
            if decision.workers[reserved.job]:
                decision, reserved = self._with_the_others(decision, reserved, following)
            else:
                decision, reserved = self._before_the_others(decision, reserved, following)
        for urgent in self._left_out(decision):
            now = Situation(view, self._places, self._first, decision, np.where(victims, 0, self._keep))
            more = victims | preempting.victims(now, urgent, self._stoppable() & ~victims)
            if (more == victims).all():
                continue
            tried = self._ask(more)
            pieces = bool(self._in_pieces[urgent])
            if preempting.is_served(view, urgent, tried, decision, more & ~victims, pieces):
                self._about[more & ~victims, 0] = view.job[urgent]
                victims, decision = more, tried
        wanted = (view.workers == 0) & (self._first.workers > 0)
        decision = self._explained(decision, victims, wanted, reserved)
        return Answer(decision, (self._keep > 0) & ~victims & self._pinned, self._about, wanted, {})

    def _ask(self, victims: BoolArray) -> Decision:
        """With these jobs stopped. Once more if others would be stopped who may not be, to whom their minimum is left
        then, or if somebody comes from another pool into the room of a reservation."""
        view, keep = self._view, np.where(victims, 0, self._keep)
        while True:
            decision = self._ask_beside(keep, victims)
            stopped = self._with_room(guarded(view) & _stops(view, decision), keep)
            comes = (self._held.strays & (decision.workers > 0) & (decision.pool == self._held.pool)).any()
            if not stopped.any() and not comes:
                return decision
            keep = np.where(stopped, view.min_workers, keep)
            if comes:
                self._held = self._held.with_strays()

    def _ask_beside(self, keep: IntArray, victims: BoolArray) -> Decision:
        """With those kept and held back out of the question."""
        view, first = self._view, self._first
        stay = keep > 0
        out = stay | self._held.now | victims
        rejected = None if first.rejected is None else first.rejected & ~stay
        if rejected is not None:
            out |= rejected
        workers, pool = keep.copy(), np.where(stay, self._pool, 0)
        room = msgspec.structs.replace(view, nodes=_nodes_beside(view, stay), max_workers=self._most())
        rest = services.only(room, ~out, view.capacity - view.used_milli(workers, pool))
        part = asking.ask(self._policy, rest, self._memory, self._when)
        reason, detail = first.reason.copy(), first.detail.copy()
        least = stay & ~self._pinned & (view.workers > 0)
        reason[least], detail[least, 0] = Reason.KEEPS_MINIMUM, keep[least]
        starts = stay & (view.workers == 0) & (first.workers == 0)
        reason[starts], detail[starts] = Reason.RUNS, ((keep * view.width + view.fixed_milli)[starts] / GPU)[:, None]
        workers[~out], pool[~out] = part.workers, part.pool
        reason[~out], detail[~out] = part.reason, part.detail
        if part.rejected is not None:
            self._say_that_it_waits(np.flatnonzero(~out)[part.rejected], reason, detail)
        nodes = None
        if part.nodes is not None:
            nodes = np.where(stay[:, None], view.placed, 0)
            nodes[~out] = part.nodes
        return Decision(
            workers=workers, pool=pool, reason=reason, detail=detail, memory=first.memory,
            wake_s=min(first.wake_s, part.wake_s), rejected=rejected, nodes=nodes,
        )  # fmt: skip

    def _say_that_it_waits(self, rows: IntArray, reason: IntArray, detail: FloatArray) -> None:
        """Whom the policy turns away beside pinned jobs, as if these held their room for ever, it took when it was
        asked about everybody: nobody is rejected for that."""
        view, first = self._view, self._first
        reason[rows], detail[rows] = first.reason[rows], first.detail[rows]
        wanted = rows[first.workers[rows] > 0]
        need = (view.min_workers * view.width + view.fixed_milli)[wanted] / GPU
        reason[wanted], detail[wanted, 0], detail[wanted, 1] = Reason.NO_ROOM, need, self._left()

    def _with_room(self, stopped: BoolArray, keep: IntArray) -> BoolArray:
        """Those of them for whose minimum there is room beside the others that are kept: not where nodes were lost."""
        view = self._view
        if not stopped.any():
            return stopped
        some: BoolArray = _within_capacity(view, np.where(stopped, view.min_workers, keep), self._pool, keep > 0) > 0
        return some & stopped

    def _most(self) -> IntArray:
        """Who starts beside a reservation, and may have to stay then, starts at the size that was reckoned with."""
        view = self._view
        new = (view.workers == 0) & reservations.may_stay(view) & ~view.is_service
        return np.where(new & self._reserves, view.asked, view.max_workers)

    def _with_the_others(
        self, decision: Decision, reserved: Reservation, following: Reservation | None
    ) -> tuple[Decision, Reservation | None]:
        """The job with the reservation starts: the others need not wait for it, if it starts beside them, too, but only
        for the next one."""
        held, self._held = self._held, reservations.held_back(self._view, self._first, following, reserved.job)
        more = self._ask(np.zeros(len(self._view), np.bool_))
        if more.workers[reserved.job]:
            return more, following
        self._held = held
        return decision, reserved

    def _before_the_others(
        self, decision: Decision, reserved: Reservation, following: Reservation | None
    ) -> tuple[Decision, Reservation | None]:
        """The policy has other plans, but if the room of the job with the reservation is there it starts: jobs that
        keep their progress give way to it, unless they are more urgent."""
        job = reserved.job
        size = self._room_for(reserved, decision)
        if not size or decision.nodes is not None:
            return decision, reserved
        self._keep[job], self._pool[job] = size, reserved.pool
        self._held = reservations.held_back(self._view, self._first, following, job)
        return self._ask(np.zeros(len(self._view), np.bool_)), following

    def _room_for(self, reserved: Reservation, decision: Decision) -> int:
        """Workers for which there are places beside those who are kept or keep their minimum, and the more urgent; 0:
        not even its own minimum."""
        view, job = self._view, reserved.job
        urgent = (view.priority > view.priority[job]) | view.is_service
        least = np.where(guarded(view), view.min_workers, 0)
        workers = np.where(self._keep > 0, self._keep, np.maximum(np.where(urgent, decision.workers, 0), least))
        pool = np.where(view.workers > 0, view.pool, decision.pool)
        free = (view.capacity - view.used_milli(workers, pool))[reserved.pool] - view.fixed_milli[job]
        low, wish = int(view.min_workers[job]), int(self._first.workers[job] or view.asked[job])
        size = min(wish, int(free) // max(int(view.width[job]), 1))
        if size < low:
            return 0
        workers[job], pool[job] = low if view.step is not None else size, reserved.pool
        placed = preempting.placed_beside(self._places, workers, pool, job)
        return int(workers[job] if placed is None else placed.sum())

    # Higher priority.

    def _left_out(self, decision: Decision) -> list[int]:
        """Those who got less than the policy gave them before, or only pieces, the most urgent first: they might stop
        somebody."""
        view, first = self._view, self._first
        less = np.where(
            view.is_service, decision.workers < first.workers, (decision.workers == 0) & (first.workers > 0)
        )
        less |= self._in_pieces
        lowest = view.priority[self._stoppable()].min(initial=np.iinfo(np.int64).max)
        some = np.flatnonzero(less & ~self._held.now & (view.priority > lowest))
        ordered: list[int] = some[np.lexsort((view.job[some], -view.priority[some]))].tolist()
        return ordered

    def _stoppable(self) -> BoolArray:
        return (self._keep > 0) & self._pinned & _preemptible(self._view)

    # Reasons.

    def _explained(
        self, decision: Decision, victims: BoolArray, wanted: BoolArray, reserved: Reservation | None
    ) -> Decision:
        view = self._view
        reason, detail = decision.reason.copy(), decision.detail.copy()
        assert view.lost_s is not None
        need = view.min_workers * view.width / GPU
        holders = (self._keep > 0) & ~victims & self._pinned
        stay = holders & _changes(view, self._first)
        reason[stay], detail[stay, 0], detail[stay, 1] = Reason.KEEPS_PROGRESS, view.lost_s[stay], 0.0
        reason[victims], detail[victims, 0], detail[victims, 1] = Reason.PREEMPTED_URGENT, view.lost_s[victims], 0.0
        # What is too large for the room that is left is not too large for the cluster.
        too_large = reason == Reason.TOO_LARGE
        detail[too_large, 1] = view.total_milli / GPU
        only_now = too_large & (detail[:, 0] * GPU <= view.total_milli)
        reason[only_now], detail[only_now, 1] = Reason.NO_ROOM, self._left()
        waits = (wanted | only_now) & (decision.workers == 0) & ~self._held.now
        for some, pools in self._by_pools(waits, wanted):
            here = holders & np.isin(view.pool, pools)
            if here.any():
                taken = view.used_milli(np.where(here, self._keep, 0), np.maximum(view.pool, 0)).sum() / GPU
                reason[some], detail[some, 0], detail[some, 1] = Reason.WAITS_FOR_PINNED, need[some], taken
                self._about[some] = _about(view, np.flatnonzero(here))
        if reserved is not None:
            job, in_s = reserved.job, max(0.0, reserved.expected_s - view.now_s)
            if reserved.until < 0 and (reserved.in_pieces or not decision.workers[job]):
                in_s = math.inf
            told = self._held.now & (view.workers == 0)
            reason[told], detail[told] = Reason.RESERVED_FOR, (need[job], in_s)
            self._about[told] = _about(view, [job])
            if not decision.workers[job]:
                reason[job], detail[job] = Reason.HAS_RESERVATION, (need[job], in_s)
                self._about[job] = _about(view, [reserved.until] if reserved.until >= 0 else [])
        return msgspec.structs.replace(decision, reason=reason, detail=detail)

    def _by_pools(self, waits: BoolArray, wanted: BoolArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Rows of those who wait, with the pools in which they do: where the policy would have them, or can run."""
        view, pools = self._view, np.arange(len(self._view.pools))
        rows = np.flatnonzero(waits)
        chosen = self._first.pool[rows, None] == pools
        where = np.where(wanted[rows, None], chosen, reservations.runs_in(view)[:, rows].T)
        for kind in np.unique(where, axis=0):
            yield rows[(where == kind).all(axis=1)], pools[kind]

    def _left(self) -> float:
        """GPUs that those who are kept leave."""
        return (self._view.total_milli - int(self._view.used_milli(self._keep, self._pool).sum())) / GPU


def _about_nobody(view: Snapshot) -> IntArray:
    about = np.full((len(view), _NAMED + 1), -1, np.int64)
    about[:, _NAMED] = 0
    return about


def _about(view: Snapshot, rows: Sequence[int] | IntArray) -> IntArray:
    """The jobs of these rows, for a sentence."""
    named = view.job[rows[:_NAMED]]
    about = np.full(_NAMED + 1, -1, np.int64)
    about[: len(named)], about[_NAMED] = named, max(0, len(rows) - _NAMED)
    return about


def _within_capacity(view: Snapshot, keep: IntArray, pool: IntArray, before: BoolArray | None = None) -> IntArray:
    """Where room was lost not everybody can stay: the most urgent do, then those who came first. `before`: who stays
    before all others."""
    free = view.capacity - view.used_milli(keep, pool)
    if (free >= 0).all():
        return keep
    keep, free = keep.copy(), view.capacity.copy()
    some = np.flatnonzero(keep)
    last = np.zeros(len(some), np.bool_) if before is None else ~before[some]
    for j in some[np.lexsort((view.job[some], -view.priority[some], last))].tolist():
        need = int(keep[j] * view.width[j] + view.fixed_milli[j])
        if need <= free[pool[j]]:
            free[pool[j]] -= need
        else:
            keep[j] = 0
    return keep


def _preemptible(view: Snapshot) -> BoolArray:
    return np.ones(len(view), np.bool_) if view.preemptible is None else view.preemptible


def _stops(view: Snapshot, decision: Decision) -> BoolArray:
    stops: BoolArray = (view.workers > 0) & (decision.workers == 0) & ~view.is_service
    return stops


def _changes(view: Snapshot, decision: Decision) -> BoolArray:
    """Who runs and would not go on as it is, as far as that is decided before workers are placed."""
    changes = (decision.workers != view.workers) | (decision.pool != view.pool)
    if decision.nodes is not None and view.placed.shape == decision.nodes.shape:
        changes = changes | (decision.nodes != view.placed).any(axis=1)
    runs: BoolArray = (view.workers > 0) & changes
    return runs


def _nodes_beside(view: Snapshot, stay: BoolArray) -> Nodes:
    """The nodes as they are beside these jobs, for policies that place by themselves; parts of a device count whole."""
    nodes = view.nodes
    if view.placed.shape[1] != len(nodes.name) or not stay.any():
        return nodes
    devices, cpu, memory = nodes.devices.copy(), nodes.cpu_milli.copy(), nodes.memory_mib.copy()
    for j in np.flatnonzero(stay).tolist():
        each = shape_of(0, int(view.width[j]), 0, 0, 0)
        devices -= view.placed[j] * max(each.devices, 1 if each.share else 0)
        cpu -= view.placed[j] * view.demand[j, 0]
        memory -= view.placed[j] * view.demand[j, 1]
    return msgspec.structs.replace(
        nodes, devices=np.maximum(devices, 0), cpu_milli=np.maximum(cpu, 0), memory_mib=np.maximum(memory, 0)
    )
