"""Decides as the cycle does, and judges every decision by what pinned and waiting jobs were promised."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from stretto.core import cycle
from stretto.core.cycle import CycleState, Outcome
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy
from stretto.core.reservations import Blocked
from stretto.core.snapshot import BoolArray, Snapshot

HAIR_S = 1e-3


class Judge:
    """`decide` goes where `cycle.decide` would. How long jobs last is told by number; hints may say otherwise."""

    def __init__(self, late_s: float) -> None:
        """`late_s`: so long after its time a job may end, and be seen to have ended."""
        self._late_s = late_s
        self.lasts_s: dict[int, float] = {}
        self.stays: set[int] = set()
        """Jobs that must be waited for once they run, whatever was said of them."""
        self.urgent = self.reserved = 0
        """Jobs that lost work to more urgent ones; jobs that started with a reservation."""
        self.wrong: list[str] = []
        self._cases: set[tuple[int, frozenset[int]]] = set()
        self._launched_s: dict[int, float] = {}
        self._promised_s: dict[int, float] = {}
        self._until_s: dict[int, float] = {}

    def decide(
        self, view: Snapshot, policy: Policy, state: CycleState, settings: cycle.Settings, fit: cycle.Fit | None = None
    ) -> Outcome:
        asked: list[tuple[Snapshot, Decision]] = []

        def function(shown: Snapshot, memory: Memory, options: Any) -> Decision:
            asked.append((shown, policy.function(shown, memory, options)))
            return asked[-1][1]

        outcome = cycle.decide(view, msgspec.structs.replace(policy, function=function), state, settings, fit)
        if asked:
            self._note_wishes(*asked[0])
        self._judge_stops(view, outcome)
        self._judge_waits(view, state.blocked, outcome)
        return outcome

    @property
    def wanted(self) -> int:
        """Cases in which the policy would have stopped or resized somebody who is pinned: each counts once, however
        often it is asked, for those whom it would have given the room."""
        return len(self._cases)

    def _note_wishes(self, view: Snapshot, first: Decision) -> None:
        """`first`: the policy's own answer, about everybody."""
        gains = frozenset(view.job[first.workers > view.workers].tolist())
        robbed = view.job[view.pinned & (first.workers != view.workers)].tolist()
        self._cases |= {(number, gains) for number in robbed}

    def _judge_stops(self, view: Snapshot, outcome: Outcome) -> None:
        changed = (outcome.workers != view.workers) | (outcome.placed != view.placed).any(axis=1)
        for j in np.flatnonzero(view.pinned & changed).tolist():
            urgent = view.job == outcome.about[j, 0]
            assert view.preemptible is not None
            served = bool((urgent & (view.priority > view.priority[j]) & (outcome.workers > 0)).any())
            self.urgent += served
            if outcome.workers[j] or not served or not view.preemptible[j]:
                self._accuse(view, f"{view.job[j]} loses {view.lost_s[j] if view.lost_s is not None else 0:.0f} s")

    def _judge_waits(self, view: Snapshot, before: Blocked, outcome: Outcome) -> None:
        """After its promised start nobody passes a job who has to be waited for, unless its turn is before; and when
        those have ended that ran then, the job starts."""
        came = (view.workers == 0) & (outcome.workers > 0)
        for number in view.job[came].tolist():
            self._launched_s[number] = view.now_s
            self._promised_s.pop(number, None)
            self._until_s.pop(number, None)
            self.reserved += number in before and before[number].is_promised
        blocked = {**before, **outcome.state.blocked}
        stays = np.isin(view.job, list(self.stays)) & (outcome.workers > 0)
        for j in np.flatnonzero((view.workers == 0) & (outcome.workers == 0)).tolist():
            number = int(view.job[j])
            wait = outcome.state.blocked.get(number)
            if wait is None or not wait.is_promised:
                continue
            promised_s = self._promised_s[number] = min(wait.promised_s, self._promised_s.get(number, np.inf))
            is_over = view.now_s > promised_s + HAIR_S
            first = _before(view, j, blocked)
            counts = stays & came if is_over else stays
            for other in view.job[counts & ~first].tolist() if is_over else ():
                self._accuse(view, f"{other} passes {number}")
            ends_s = [self._launched_s[n] + self.lasts_s[n] for n in view.job[counts].tolist()]
            until_s = max([*ends_s, promised_s, self._until_s.get(number, 0.0)])
            self._until_s[number] = until_s
            in_the_way = first & ((outcome.workers > 0) | np.isin(view.job, list(outcome.state.blocked)))
            if view.now_s > until_s + self._late_s and not in_the_way.any():
                self._accuse(view, f"{number} waits, not only to {until_s % 1e5:.0f} s")

    def _accuse(self, view: Snapshot, what: str) -> None:
        self.wrong.append(f"at {view.now_s % 1e5:.1f} s: {what}")


def _before(view: Snapshot, j: int, blocked: Blocked) -> BoolArray:
    """Whose turn is before that of job j: the more urgent, and equals whose reservations come first."""
    rank = blocked[int(view.job[j])].since_s, int(view.job[j])
    earlier = [number for number, wait in blocked.items() if (wait.since_s, number) < rank]
    equal = (view.priority == view.priority[j]) & np.isin(view.job, earlier)
    before: BoolArray = (view.priority > view.priority[j]) | equal
    return before
