"""Random schedules of faults: what is done to a job, when and to whom, from a seed alone; and how one is played.

    plan = schedule(seed)
    environment = {"STRETTO_CHECKPOINT_S": str(plan.checkpoint_s)}
    with Harness(folder, command, workers=plan.workers, environment=environment) as harness:
        played = play(plan, harness)

A schedule is a value: the same seed gives the same script of faults. Who is there at a moment, and what a fault meets,
depends on the machine, so a fault names its victim by place (`pick`), and `Played` says what really struck. The strikes
come at a random time or at an awkward moment, which is waited for: while a switch is under way, while state is on its
way to a newcomer, just after a generation was formed, while a loss is being repaired, at the end of the loop. What only
the script can show of these (the transfer, the end) it tells through `signs`.

`play` also does what a control plane would: a job that has no workers left but leavers gets new ones, and workers that
never came to be members are stopped when the job is over.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stretto.testing.harness import DEADLINE_S, Harness, Worker

MOST = 4
"""Workers of a job at most, newcomers that are not in yet aside."""
KINDS = {
    "kill": 4,
    "kill leader": 3,
    "kill two": 2,
    "kill all": 3,
    "kill newcomer": 3,
    "freeze": 2,
    "freeze leader": 2,
    "freeze newcomer": 2,
    "hiccup": 2,
    "join": 3,
    "leave": 3,
    "leave leader": 2,
    "migrate": 2,
    "coordinator": 4,
}
"""What is done, and how often beside the others.

A freeze lasts until the others go on without the worker, a hiccup is too short for that. A newcomer is killed or frozen
while it warms up or is being connected. Who migrates is replaced by a newcomer: all members at once.
"""
_ASKED = ("join", "leave", "leave leader", "migrate")
"""What a coordinator must be there for, to hear of it."""
MOMENTS = {"later": 8, "switch": 4, "transfer": 3, "formed": 2, "repair": 3}
"""When it is done, and how often beside the others; `end` comes in addition, for the last strike only."""
_AT_END, _TWO_AT_ONCE = 0.2, 0.3
_MOMENT_S = 10.0
"""How long a moment may let wait for itself."""
_FREEZE_S = 4.0
"""A frozen worker that nobody can go on without wakes after so long."""
_LOOK_S = 0.002
"""How often a moment is looked out for: some are over in a few milliseconds."""


class Fault(NamedTuple):
    kind: str
    pick: float = 0.0
    """Whom of those it may hit, from 0 to 1."""
    hold_s: float = 0.0
    """How long the coordinator stays away or a hiccup lasts; how old a newcomer gets before it is hit."""


class Strike(NamedTuple):
    """Faults at one moment, at once."""

    when: str
    delay_s: float
    """From the moment on."""
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        kinds = " & ".join(fault.kind for fault in self.faults)
        return f"{self.when}+{1000 * self.delay_s:.0f}ms {kinds}"


class Schedule(NamedTuple):
    seed: int
    workers: int
    """At the start."""
    checkpoint_s: float
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        return "; ".join([f"{self.workers} workers", *map(str, self.strikes)])


@dataclass
class Played:
    """What came of a schedule."""

    struck: Counter[str] = field(default_factory=Counter)
    """How often each kind of fault hit somebody."""
    during: Counter[str] = field(default_factory=Counter)
    """How many of them met a switch or a transfer under way, or came at the end, or while the coordinator was away."""
    missed: Counter[str] = field(default_factory=Counter)
    """Faults that came after the job's end or found nobody to hit, and moments that did not come."""
    generations: int = 0
    unplanned: int = 0
    """Of them, those after the first that a loss or a broken group made necessary."""
    end: dict[str, Any] = field(default_factory=dict)
    """The event with which the job ended."""


def schedule(seed: int) -> Schedule:
    """The script of faults of a seed."""
    chance = random.Random(seed)
    workers = chance.choice((1, 2, 2, 3, 3))
    checkpoint_s = chance.choice((0.05, 0.05, 0.3, 1e9))
    strikes = [_strike(chance, _choice(chance, MOMENTS)) for _ in range(chance.randint(1, 5))]
    if chance.random() < _AT_END:
        strikes[-1] = _strike(chance, "end")
    return Schedule(seed, workers, checkpoint_s, tuple(strikes))


def _strike(chance: random.Random, when: str) -> Strike:
    # Half of them right at the moment: some windows are open for less than a millisecond.
    longest_s = {"later": 0.6, "end": 0.03}.get(when, 0.08)
    delay_s = max(0.0, chance.uniform(0.0 if when == "later" else -longest_s, longest_s))
    kinds = [_choice(chance, KINDS)]
    if chance.random() < _TWO_AT_ONCE:
        kinds.append(_choice(chance, {kind: often for kind, often in KINDS.items() if kind != kinds[0]}))
    if kinds[0] == "coordinator" and kinds[-1] in _ASKED:
        kinds.reverse()
    return Strike(when, delay_s, tuple(Fault(kind, chance.random(), chance.uniform(0.0, 0.5)) for kind in kinds))


def _choice(chance: random.Random, often: Mapping[str, int]) -> str:
    return chance.choices(list(often), list(often.values()))[0]


def play(
    plan: Schedule,
    harness: Harness,
    signs: Mapping[str, Callable[[], bool]] | None = None,
    calm: Callable[[], None] = lambda: None,
    deadline_s: float = DEADLINE_S,
) -> Played:
    """Play a schedule on a job that has been started, and wait for its end; raises `HarnessError` if it does not come.

    `signs` may tell whether there is a `transfer` under way and whether the `end` is near; `calm` is called when no
    strike before the end is left, so that the script may hurry. The `deadline_s` is for what comes after that.
    """
    player = _Player(harness, signs or {}, deadline_s)
    harness.wait(lambda: len(harness.members()) == plan.workers or harness.over, "all are in")
    for strike in plan.strikes:
        if strike.when == "end":
            calm()
        player.strike(strike)
    calm()
    player.finish()
    return player.played


class _Player:
    """Strikes, thaws whom it froze, and keeps the job supplied with workers."""

    def __init__(self, harness: Harness, signs: Mapping[str, Callable[[], bool]], deadline_s: float) -> None:
        self.harness, self.signs, self.deadline_s = harness, signs, deadline_s
        self.played = Played()
        self.frozen: dict[str, tuple[Worker, float, bool]] = {}
        """By name: the worker, until when, and whether it wakes as soon as it is out."""
        self.away_s = -1.0
        """How long the coordinator is still to be away; negative when it is there."""
        self.reserve = 1
        """So many are started when nobody is left."""

    def strike(self, strike: Strike) -> None:
        if not self._reach(strike.when) and not self.harness.over:
            self.played.missed[f"no {strike.when}"] += 1
        self._until(lambda: False, strike.delay_s)
        for fault in strike.faults:
            self._hit(fault, strike.when)
        if self.away_s >= 0:
            self._until(lambda: False, self.away_s)
            self.away_s = -1.0
            self.harness.start_coordinator()
            self.harness.tell({"want": self.harness.size})  # What was wanted meanwhile it did not hear.
        self._tend()

    def _hit(self, fault: Fault, when: str) -> None:
        if self.harness.over:
            self.played.missed["over"] += 1
            return
        met = [name for name, there in self._circumstances(when).items() if there]
        if _HITS[fault.kind](self, fault):
            self.played.struck[fault.kind] += 1
            self.played.during.update(met)
        else:
            self.played.missed[f"nobody to {fault.kind}"] += 1

    def _circumstances(self, when: str) -> dict[str, bool]:
        return {
            "switch": self._number("announced") > self._number("formed"),
            "transfer": self._sign("transfer"),
            "end": when == "end" and self._sign("end"),
            "coordinator away": self.away_s >= 0,
        }

    # Moments.

    def _reach(self, when: str) -> bool:
        """Bring the moment about, and wait for it; False if it does not come."""
        if when == "later" or self.harness.over:
            return not self.harness.over
        if when == "end":
            return "end" not in self.signs or self._until(self.signs["end"], self.deadline_s)
        before = self._number("announced")
        if when == "repair":
            if self._kill(Fault("kill")):
                self.played.struck["kill"] += 1
            return self._until(lambda: self._newer("announced", before, planned=False), _MOMENT_S)
        self._change(grow=when == "transfer")
        if when == "switch":
            return self._until(lambda: self._newer("announced", before, planned=True), _MOMENT_S)
        if when == "transfer" and "transfer" in self.signs:
            return self._until(self.signs["transfer"], _MOMENT_S)
        return self._until(lambda: self._number("formed") > before, _MOMENT_S)

    def _change(self, *, grow: bool) -> None:
        """A planned change: one more, or one fewer where there are most; for mere growth one in place of another."""
        newest = self.harness.last("announced")
        members = newest["members"] if newest is not None else []
        if len(members) < MOST:
            self.harness.want(len(members) + 1)
        elif grow:
            self._migrate(members[:1])
        else:
            self.harness.want(MOST - 1)

    def _newer(self, event: str, before: int, *, planned: bool) -> bool:
        found = self.harness.last(event)
        return found is not None and found["number"] > before and found["planned"] is planned

    def _number(self, event: str) -> int:
        found = self.harness.last(event)
        return int(found["number"]) if found is not None else 0

    def _sign(self, name: str) -> bool:
        return name in self.signs and self.signs[name]()

    # Faults: each says whether it hit anybody.

    def _members(self) -> list[Worker]:
        """Who is in and can be hit, the leader first: of the last list that all must follow, formed or not."""
        listed, formed = self.harness.last("announced"), self.harness.members()
        if listed is not None and not listed["planned"] and listed["number"] > self._number("formed"):
            formed = listed["members"]
        there = [self.harness.worker(name) for name in formed]
        return [worker for worker in there if worker.running and worker.name not in self.frozen]

    def _victims(self, fault: Fault) -> list[Worker]:
        """All members, beginning with the one that is picked."""
        members = self._members()
        first = int(fault.pick * len(members))
        return [*members[first:], *members[:first]]

    def _kill(self, fault: Fault) -> bool:
        return _kill_each(self._victims(fault)[:1])

    def _kill_leader(self, fault: Fault) -> bool:
        return _kill_each(self._members()[:1])

    def _kill_two(self, fault: Fault) -> bool:
        return _kill_each(self._victims(fault)[:2])

    def _kill_all(self, fault: Fault) -> bool:
        """Newcomers too: nobody is left, and the job goes on from its last checkpoint."""
        self.reserve = 1 + int(3 * fault.pick)
        return _kill_each([worker for worker in self.harness.workers if worker.running])

    def _newcomer(self, fault: Fault) -> Worker:
        self.harness.want(min(len(self.harness.members()) + 1, MOST))
        newest = self.harness.workers[-1]
        if newest.name in self.harness.members():
            newest = self.harness.launch()[0]
        self._until(lambda: False, fault.hold_s)
        return newest

    def _kill_newcomer(self, fault: Fault) -> bool:
        return _kill_each([self._newcomer(fault)])

    def _freeze_newcomer(self, fault: Fault) -> bool:
        return self._stop([self._newcomer(fault)], 4 * fault.hold_s, until_out=False)

    def _freeze(self, fault: Fault) -> bool:
        return self._stop(self._victims(fault), _FREEZE_S, until_out=True)

    def _freeze_leader(self, fault: Fault) -> bool:
        return self._stop(self._members(), _FREEZE_S, until_out=True)

    def _hiccup(self, fault: Fault) -> bool:
        return self._stop(self._victims(fault), fault.hold_s, until_out=False)

    def _stop(self, workers: list[Worker], seconds: float, *, until_out: bool) -> bool:
        """Freeze the first."""
        for worker in workers[:1]:
            worker.freeze()
            self.frozen[worker.name] = worker, time.monotonic() + seconds, until_out
        return bool(workers)

    def _join(self, fault: Fault) -> bool:
        members = self.harness.members()
        if len(members) >= MOST:
            return False
        self.harness.want(len(members) + 1)
        return True

    def _leave(self, fault: Fault) -> bool:
        members = self.harness.members()
        if len(members) > 1:
            self.harness.want(len(members) - 1)
        return len(members) > 1

    def _leave_leader(self, fault: Fault) -> bool:
        members = self.harness.members()
        if len(members) > 1:
            self.harness.leave(members[0])
        return len(members) > 1

    def _migrate_all(self, fault: Fault) -> bool:
        return self._migrate(self.harness.members())

    def _migrate(self, members: list[str]) -> bool:
        self.harness.launch(len(members))
        self.harness.tell({"want": len(self.harness.members()), "leave": members})
        return True

    def _coordinator(self, fault: Fault) -> bool:
        """It is started again when the other fault of this strike has struck, too."""
        self.harness.kill_coordinator()
        self.away_s = fault.hold_s
        return True

    # Meanwhile.

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether the condition came true within so long, and before the job's end."""
        end_s = time.monotonic() + seconds
        with self.harness.changed:
            while not (true := condition()) and not self.harness.over and time.monotonic() < end_s:
                self._tend()
                self.harness.changed.wait(_LOOK_S)
        return true

    def _tend(self) -> None:
        now_s, members = time.monotonic(), self.harness.members()
        for name, (worker, until_s, until_out) in list(self.frozen.items()):
            if now_s >= until_s or self.harness.over or (until_out and name not in members):
                worker.thaw()
                del self.frozen[name]
        newest = self.harness.last("announced")
        leavers = newest["leavers"] if newest is not None else []
        if not self.harness.over and not any(w.running and w.name not in leavers for w in self.harness.workers):
            self.harness.launch(self.reserve)

    def finish(self) -> None:
        """Wait for the job's end and for that of all its workers."""

        def over() -> bool:
            self._tend()
            return self.harness.over

        self.harness.wait(over, "the end of the job", self.deadline_s)
        self._until_ended()
        announced = [event for event in self.harness.events if event["event"] == "announced"]
        self.played.generations = len(announced)
        self.played.unplanned = sum(not event["planned"] for event in announced[1:])
        self.played.end = self.harness.wait_over()

    def _until_ended(self) -> None:
        """Who was never announced is no part of the job, and may look in vain for a coordinator that has ended."""
        self._tend()
        known = {name for event in self.harness.events if event["event"] == "announced" for name in event["members"]}
        for worker in self.harness.workers:
            if worker.name not in known:
                worker.kill()


def _kill_each(workers: list[Worker]) -> bool:
    found = [worker for worker in workers if worker.running]
    for worker in found:
        worker.kill()
    return bool(found)


_HITS: dict[str, Callable[[_Player, Fault], bool]] = {
    "kill": _Player._kill,
    "kill leader": _Player._kill_leader,
    "kill two": _Player._kill_two,
    "kill all": _Player._kill_all,
    "kill newcomer": _Player._kill_newcomer,
    "freeze": _Player._freeze,
    "freeze leader": _Player._freeze_leader,
    "freeze newcomer": _Player._freeze_newcomer,
    "hiccup": _Player._hiccup,
    "join": _Player._join,
    "leave": _Player._leave,
    "leave leader": _Player._leave_leader,
    "migrate": _Player._migrate_all,
    "coordinator": _Player._coordinator,
}
