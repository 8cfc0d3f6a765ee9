"""Progress is not given away: jobs that would lose their work keep what they have, whatever a policy wants.

A job is *pinned* while a stop would lose more work than two starts cost (`Snapshot.pinned`). A policy need not know:

1. It is asked about everybody. If it leaves the pinned jobs as they are, its answer holds.
2. Otherwise it is asked once more, about the others and the room that the pinned jobs leave; what it remembers of the
   first answer is kept. So nobody is stopped, moved or resized for an equal.
3. Somebody of strictly higher priority who is left out by that may stop pinned jobs that are preemptible: the least
   urgent first, then those that lose least, and only if the room really goes to more urgent jobs.
4. A job that keeps its progress and yet is not preemptible is never stopped: it keeps its minimum.

Whoever the policy wanted to start and who is kept from it by pinned jobs is told so, and is remembered: see
`reservations`, which see to it that nobody starves.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core import asking, reservations, services
from stretto.core.decision import Decision, Memory
from stretto.core.placement.room import shape_of
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.reservations import Blocked, Reservation
from stretto.core.snapshot import GPU, BoolArray, IntArray, Nodes, Snapshot

_NAMED = 3
"""Jobs that a sentence names at most."""


class Answer(NamedTuple):
    """A decision that takes no work from anybody who may keep it."""

    decision: Decision
    kept: BoolArray
    """Whose size and place must not change."""
    about: IntArray
    """[job, 3] the numbers of the jobs that the reason names; -1: none."""
    wanted: BoolArray
    """Whom the policy would have started if nobody were pinned."""


def ask(policy: Policy, view: Snapshot, memory: Memory, blocked: Blocked, reserve_after_s: float, when: str) -> Answer:
    """What the policy says, without what it must not do."""
    first = asking.ask(policy, view, memory, when)
    nobody, about = np.zeros(len(view), np.bool_), np.full((len(view), _NAMED), -1, np.int64)
    wanted = (view.workers == 0) & (first.workers > 0)
    if view.lost_s is None:
        return Answer(first, nobody, about, wanted)
    pinned = view.pinned
    reserved = reservations.made(view, first.workers, blocked, reserve_after_s)
    held = reservations.held_back(view, reserved)
    stopped = _stops(view, first)
    protected = stopped & ~_fragile(view) & ~_preemptible(view)
    if not ((pinned & _changes(view, first)) | protected | (held & wanted)).any():
        return Answer(first, pinned, about, wanted)
    keep = _within_capacity(view, np.where(pinned, view.workers, np.where(protected, view.min_workers, 0)))
    question = _Question(policy, view, memory, first, keep, held, when)
    if reserved is None:
        return question.answer(None, None)
    late = {number: wait for number, wait in blocked.items() if number != view.job[reserved.job]}
    following = reservations.made(view, first.workers, late, reserve_after_s)
    return question.answer(reserved, following)


class _Question:
    """The second question: about those who are not kept, and the room that is left to them."""

    def __init__(
        self,
        policy: Policy,
        view: Snapshot,
        memory: Memory,
        first: Decision,
        keep: IntArray,
        held: BoolArray,
        when: str,
    ) -> None:
        self._policy, self._view, self._memory, self._first, self._when = policy, view, memory, first, when
        self._keep, self._held = keep, held
        self._reserves = False
        self._about = np.full((len(view), _NAMED), -1, np.int64)

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
            more = victims | self._victims(urgent, decision, victims)
            if (more == victims).all():
                continue
            tried = self._ask(more)
            if self._is_served(urgent, tried, decision, more & ~victims):
                self._about[more & ~victims, 0] = view.job[urgent]
                victims, decision = more, tried
        wanted = (view.workers == 0) & (self._first.workers > 0)
        decision = self._explained(decision, victims, wanted, reserved)
        return Answer(decision, (self._keep > 0) & ~victims & view.pinned, self._about, wanted)

    def _ask(self, victims: BoolArray) -> Decision:
        """With these jobs stopped, and those kept and held back out of the question."""
        view, first = self._view, self._first
        stay = (self._keep > 0) & ~victims
        out = stay | self._held | victims
        workers = np.where(stay, self._keep, 0)
        pool = np.where(stay, np.where(view.workers > 0, view.pool, first.pool), 0)
        room = msgspec.structs.replace(view, nodes=_nodes_beside(view, stay), max_workers=self._most())
        rest = services.only(room, ~out, view.capacity - view.used_milli(workers, pool))
        part = asking.ask(self._policy, rest, self._memory, self._when)
        reason, detail = first.reason.copy(), first.detail.copy()
        workers[~out], pool[~out] = part.workers, part.pool
        reason[~out], detail[~out] = part.reason, part.detail
        rejected = None
        if part.rejected is not None:
            rejected = np.zeros(len(view), np.bool_)
            rejected[~out] = part.rejected
        nodes = None
        if part.nodes is not None:
            nodes = np.where(stay[:, None], view.placed, 0)
            nodes[~out] = part.nodes
        return Decision(
            workers=workers, pool=pool, reason=reason, detail=detail, memory=first.memory,
            wake_s=min(first.wake_s, part.wake_s), rejected=rejected, nodes=nodes,
        )  # fmt: skip

    def _most(self) -> IntArray:
        """Who starts beside a reservation, and will be pinned then, starts at the size that was reckoned with."""
        view = self._view
        new = (view.workers == 0) & _fragile(view) & ~view.is_service
        return np.where(new & self._reserves, view.asked, view.max_workers)

    def _with_the_others(
        self, decision: Decision, reserved: Reservation, following: Reservation | None
    ) -> tuple[Decision, Reservation | None]:
        """The job with the reservation starts: the others need not wait for it, if it starts beside them, too, but only
        for the next one."""
        held, self._held = self._held, reservations.held_back(self._view, following, reserved.job)
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
        job, held = reserved.job, self._held
        size = self._room_for(job, decision)
        if not size or decision.nodes is not None:
            return decision, reserved
        self._keep[job] = size
        self._held = reservations.held_back(self._view, following, job)
        return self._ask(np.zeros_like(held)), following

    def _room_for(self, job: int, decision: Decision) -> int:
        """Workers that it can have beside those who are kept and the more urgent; 0: not even its minimum."""
        view, first = self._view, self._first
        urgent = (view.priority > view.priority[job]) | view.is_service
        workers = np.where(self._keep > 0, self._keep, np.where(urgent, decision.workers, 0))
        pool = np.where(self._keep > 0, np.maximum(view.pool, 0), decision.pool)
        free = (view.capacity - view.used_milli(workers, pool))[first.pool[job]] - view.fixed_milli[job]
        low = int(view.min_workers[job])
        size = min(int(first.workers[job]), int(free) // max(int(view.width[job]), 1))
        return 0 if size < low else low if view.step is not None else size

    # Higher priority.

    def _left_out(self, decision: Decision) -> list[int]:
        """Those who got less than the policy gave them before, the most urgent first: they might stop somebody."""
        view, first = self._view, self._first
        less = np.where(
            view.is_service, decision.workers < first.workers, (decision.workers == 0) & (first.workers > 0)
        )
        lowest = view.priority[self._stoppable()].min(initial=np.iinfo(np.int64).max)
        some = np.flatnonzero(less & ~self._held & (view.priority > lowest))
        ordered: list[int] = some[np.lexsort((view.job[some], -view.priority[some]))].tolist()
        return ordered

    def _stoppable(self) -> BoolArray:
        return (self._keep > 0) & self._view.pinned & _preemptible(self._view)

    def _victims(self, urgent: int, decision: Decision, already: BoolArray) -> BoolArray:
        """As few of the less urgent as make room for this one; nobody if all of them do not."""
        view, first = self._view, self._first
        lacks = int(first.workers[urgent] if view.is_service[urgent] else view.min_workers[urgent])
        need = (lacks - int(decision.workers[urgent])) * int(view.width[urgent])
        pool = int(first.pool[urgent])
        used = view.used_milli(decision.workers, np.maximum(decision.pool, 0))
        free = int(view.capacity[pool] - used[pool])
        less = self._stoppable() & ~already & (view.priority < view.priority[urgent]) & (view.pool == pool)
        some = np.flatnonzero(less)
        chosen = np.zeros(len(view), np.bool_)
        assert view.lost_s is not None
        for j in some[np.lexsort((view.job[some], view.lost_s[some], view.priority[some]))].tolist():
            if free >= need:
                break
            free += int(view.workers[j] * view.width[j] + view.fixed_milli[j])
            chosen[j] = True
        # A service is helped by every replica, a training job by its minimum only.
        enough = int(view.width[urgent]) if view.is_service[urgent] else need
        return chosen if free >= enough else np.zeros(len(view), np.bool_)

    def _is_served(self, urgent: int, tried: Decision, before: Decision, stopped: BoolArray) -> bool:
        """Whether it gets more by these stops, and the room really goes to more urgent jobs: they get more than the
        others give up and was free. Otherwise somebody would lose work for an equal to whom the policy gives theirs."""
        view = self._view
        holds = (view.workers * view.width + np.where(view.workers > 0, view.fixed_milli, 0))[~stopped]
        gets = (tried.workers * view.width + np.where(tried.workers > 0, view.fixed_milli, 0))[~stopped]
        urgently = (view.priority > view.priority[stopped].max())[~stopped]
        free = view.total_milli - int(view.used_milli(view.workers, np.maximum(view.pool, 0)).sum())
        spare = free + int(np.maximum(holds - gets, 0).sum())
        more = int(np.maximum(gets - holds, 0)[urgently].sum())
        return bool(tried.workers[urgent] > before.workers[urgent]) and more > spare

    # Reasons.

    def _explained(
        self, decision: Decision, victims: BoolArray, wanted: BoolArray, reserved: Reservation | None
    ) -> Decision:
        view = self._view
        reason, detail = decision.reason.copy(), decision.detail.copy()
        assert view.lost_s is not None
        need = view.min_workers * view.width / GPU
        stay = (self._keep > 0) & ~victims & _changes(view, self._first)
        reason[stay], detail[stay, 0], detail[stay, 1] = Reason.KEEPS_PROGRESS, view.lost_s[stay], 0.0
        reason[victims], detail[victims, 0], detail[victims, 1] = Reason.PREEMPTED_URGENT, view.lost_s[victims], 0.0
        waits = wanted & (decision.workers == 0) & ~self._held
        holders = (self._keep > 0) & ~victims
        taken = float(view.used_milli(np.where(holders, self._keep, 0), np.maximum(view.pool, 0)).sum()) / GPU
        reason[waits], detail[waits, 0], detail[waits, 1] = Reason.WAITS_FOR_PINNED, need[waits], taken
        named = np.flatnonzero(holders)[:_NAMED]
        self._about[waits, : len(named)] = view.job[named]
        if reserved is not None:
            told = self._held & (view.workers == 0)
            reason[told], detail[told, 0] = Reason.RESERVED_FOR, need[reserved.job]
            detail[told, 1] = max(0.0, reserved.start_s - view.now_s)
            self._about[told, 0] = view.job[reserved.job]
        return msgspec.structs.replace(decision, reason=reason, detail=detail)


def _within_capacity(view: Snapshot, keep: IntArray) -> IntArray:
    """Where room was lost not everybody can stay: the most urgent do, then those who came first."""
    pool = np.maximum(view.pool, 0)
    free = view.capacity - view.used_milli(keep, pool)
    if (free >= 0).all():
        return keep
    keep, free = keep.copy(), view.capacity.copy()
    some = np.flatnonzero(keep)
    for j in some[np.lexsort((view.job[some], -view.priority[some]))].tolist():
        need = int(keep[j] * view.width[j] + view.fixed_milli[j])
        if need <= free[pool[j]]:
            free[pool[j]] -= need
        else:
            keep[j] = 0
    return keep


def _preemptible(view: Snapshot) -> BoolArray:
    return np.ones(len(view), np.bool_) if view.preemptible is None else view.preemptible


def _fragile(view: Snapshot) -> BoolArray:
    return np.zeros(len(view), np.bool_) if view.fragile is None else view.fragile


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
