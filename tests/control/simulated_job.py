"""A job in one thread: the real state machine, and a small model of workers that train, die, freeze and lose messages.

A worker's state is its *lineage*: for every step applied, the generation it was applied in. What a reduction and a
formation need of their members is modelled exactly; when anything happens is left to the caller.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from stretto.control import events as c
from stretto.control.coordinator import begin, handle, wake_s
from stretto.control.journal import Record, replay
from stretto.control.roster import Settings, State
from stretto.runtime import messages as m

SETTINGS = Settings(token="secret", min_workers=1, want=2)


@dataclass
class Process:
    """One worker, as it sees itself."""

    name: str
    heard_s: float
    alive: bool = True
    frozen: bool = False
    stuck: bool = False
    """Its heart beats, but it does nothing else."""
    cut_off: bool = False
    connection: int | None = None
    to_coordinator: list[m.Message] = field(default_factory=list)
    from_coordinator: list[m.Message] = field(default_factory=list)
    facts: dict[type[m.Message], m.Message] = field(default_factory=dict)
    newest: m.Switch | None = None
    entered: m.Switch | None = None
    formed: int = 0
    received: tuple[int, tuple[int, ...]] | None = None
    """What the exchange of a generation gave it, not yet taken in."""
    reduced: tuple[int, m.Switch | None] | None = None
    """A reduction that it has not applied yet, and the generation to go to after it."""
    holds: bool = False
    lineage: tuple[int, ...] = ()
    broken: bool = False
    waiting: bool = False
    """For its release, or to be needed after all."""
    out: str = ""

    @property
    def generation(self) -> int:
        return self.entered.generation if self.entered else 0

    @property
    def running(self) -> bool:
        return self.alive and not self.frozen and not self.out

    def hello(self) -> m.Hello:
        return m.Hello(
            worker=self.name,
            incarnation=f"i-{self.name}",
            token="secret",
            address=f"{self.name}:1",
            generation=self.generation,
            applied=len(self.lineage),
            holds_state=self.holds,
            ready=m.Ready in self.facts,
        )


class Job:
    """The world. Every public method is one thing that may happen next; those that cannot happen do nothing."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.state: State = begin(settings)
        self.journal: list[Record] = []
        self.processes: dict[str, Process] = {}
        self.closing: list[int] = []
        self.broken_links: set[frozenset[str]] = set()
        self.now_s = 0.0
        self.beat_s = 0.0
        self.crash_after: int | None = None
        self.log: list[str] = []
        self.effects: list[c.Effect] = []
        self.applied: list[tuple[int, int]] = []
        """Step and generation, for every step that any process applied."""
        self.committed: tuple[int, ...] = ()
        self.checkpoint: tuple[int, ...] = ()
        self.last_reduced = 0
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)

    # What the coordinator does.

    def tell(self, event: c.Event) -> None:
        self.state, effects = handle(self.state, event, self.now_s)
        for done, effect in enumerate(effects):
            if self.crash_after is not None and done >= self.crash_after:
                self.restart_coordinator()
                return
            self._carry_out(effect)

    def _carry_out(self, effect: c.Effect) -> None:
        self.effects.append(effect)
        match effect:
            case c.Journal(record):
                self.journal.append(record)
            case c.Send(connection, _, message):
                for process in self.processes.values():
                    if process.connection == connection:
                        process.from_coordinator.append(message)
            case c.Refuse(connection, text):
                raise AssertionError(f"refused: {text}")
            case c.Announced(number, members, leavers, planned, why):
                left = f" -{' '.join(leavers)}" if leavers else ""
                kind = "planned" if planned else "at once"
                self.log.append(f"{self.now_s:6.1f}  {number}: {' '.join(members)}{left}  ({kind}: {why})")
            case c.Formed(number):
                self.log.append(f"{self.now_s:6.1f}  {number} formed")
            case c.Evicted(worker, reason):
                self.log.append(f"{self.now_s:6.1f}  {worker} evicted: {reason}")
            case c.Failed(reason):
                self.log.append(f"{self.now_s:6.1f}  failed: {reason}")
            case c.Done():
                self.log.append(f"{self.now_s:6.1f}  done")

    def restart_coordinator(self) -> None:
        self.crash_after = None
        self.log.append(f"{self.now_s:6.1f}  coordinator restarted")
        self.state = replay(list(self.journal), self.settings, self.now_s)
        self.closing.clear()
        for process in self.processes.values():
            self._hang_up(process)

    # What happens around it.

    def spawn(self) -> Process:
        process = Process(f"w{next(self._names)}", heard_s=self.now_s)
        self.processes[process.name] = process
        self.connect(process)
        return process

    def connect(self, process: Process) -> None:
        if process.running and not process.cut_off and process.connection is None:
            process.connection = next(self._numbers)
            process.to_coordinator = [process.hello(), *process.facts.values()]
            process.from_coordinator = []

    def cut(self, process: Process) -> None:
        """The connection breaks; what was under way is lost."""
        if process.connection is not None:
            self.closing.append(process.connection)
            self._hang_up(process)

    def _hang_up(self, process: Process) -> None:
        process.connection = None
        process.to_coordinator.clear()
        process.from_coordinator.clear()

    def notice_closed(self) -> None:
        if self.closing:
            self.tell(c.Closed(self.closing.pop(0)))

    def kill(self, process: Process) -> None:
        process.alive = False
        self.cut(process)

    def reap(self, process: Process) -> None:
        if not process.alive:
            self.tell(c.Exited(process.name))

    def say(self, process: Process, message: m.Message) -> None:
        if isinstance(message, (m.Ready, m.Formed, m.Committed, m.Broken, m.LoopEnd)):
            process.facts[type(message)] = message
        if process.connection is not None:
            process.to_coordinator.append(message)

    def get_ready(self, process: Process) -> None:
        if process.running and m.Ready not in process.facts:
            self.say(process, m.Ready(fingerprint={"data": "100"}))

    def deliver_up(self, process: Process) -> None:
        if process.to_coordinator and process.connection is not None and not process.cut_off:
            self.tell(c.Received(process.connection, process.to_coordinator.pop(0)))

    def deliver_down(self, process: Process) -> None:
        if process.from_coordinator and process.running and not process.cut_off:
            process.heard_s = self.now_s
            self._hear(process, process.from_coordinator.pop(0))

    def _hear(self, process: Process, message: m.Message) -> None:
        match message:
            case m.Evict(reason=reason):
                self._end(process, f"evicted: {reason}")
            case m.Fail(text=text):
                self._end(process, f"failed: {text}")
            case m.Release():
                self.say(process, m.Bye(reason="left"))
                process.out = "released"
            case m.Switch() if message.generation > max(
                process.generation, process.newest.generation if process.newest else 0
            ):
                process.newest = message
                if not process.stuck:
                    self._consider(process)

    def _end(self, process: Process, why: str) -> None:
        process.out = why

    def _consider(self, process: Process) -> None:
        """A list that must be followed at once: not planned, or this worker has nothing to train on meanwhile."""
        newest = process.newest
        if newest is None or newest.generation <= process.generation:
            return
        named = process.name in [peer.worker for peer in newest.members]
        if newest.planned and process.holds and not (process.waiting and named):
            return
        process.reduced = None
        if named:
            self._enter(process, newest)
        elif process.name in newest.leavers:
            process.waiting = True
        else:
            self._end(process, "no place")

    def _enter(self, process: Process, switch: m.Switch) -> None:
        process.entered, process.broken, process.waiting, process.received = switch, False, False, None
        for kind in (m.Formed, m.Committed, m.Broken, m.LoopEnd):
            process.facts.pop(kind, None)

    # What workers do among themselves.

    def peers(self, switch: m.Switch) -> list[Process]:
        return [self.processes[peer.worker] for peer in switch.members]

    def _fit(self, process: Process) -> bool:
        """Runs, and its lease too: a worker looks at that before everything it does for others."""
        if process.running and self.now_s - process.heard_s > self.settings.lease_s:
            self._end(process, "lease over")
            self.cut(process)
        return process.running and not process.stuck

    def _linked(self, group: list[Process]) -> bool:
        return not any({a.name, b.name} == link for link in self.broken_links for a in group for b in group)

    def exchange(self, process: Process) -> None:
        """Everybody of a generation is in it and connected: whoever is behind gets the state of who is furthest."""
        switch = process.entered
        if switch is None:
            return
        group = self.peers(switch)
        ready = all(
            self._fit(p)
            and p.generation == switch.generation
            and p.formed < switch.generation
            and not p.broken
            and not p.waiting
            and p.received is None
            for p in group
        )
        if not ready or not self._linked(group):
            return
        holders = [p.lineage for p in group if p.holds]
        best = max(holders, key=len) if holders else self.checkpoint
        self._check_nothing_lost(best)
        if not holders:
            self.committed = self.checkpoint
            self.applied = [(step, generation) for step, generation in enumerate(self.checkpoint, 1)]
        for p in group:
            p.received = (switch.generation, best)

    def _check_nothing_lost(self, lineage: tuple[int, ...]) -> None:
        """A committed step is only undone when everybody who has it is gone, or surely stopped."""
        undone = [k for k, gen in enumerate(self.committed) if k >= len(lineage) or lineage[k] != gen]
        if not undone:
            return
        for p in self.processes.values():
            has = p.holds and p.lineage[: undone[0] + 1] == self.committed[: undone[0] + 1]
            known = self.state.workers.get(f"i-{p.name}")
            gone = not p.alive or p.out or (known is not None and (known.out or known.ended))
            assert not has or gone, f"{p.name} has committed step {undone[0] + 1}, which is done again"
        self.committed = lineage[: undone[0]]

    def take_in(self, process: Process) -> None:
        """The exchange is over for this one."""
        if process.received is None or not self._fit(process):
            return
        process.formed, process.lineage = process.received
        process.received, process.holds = None, True
        self.say(process, m.Formed(generation=process.formed, applied=len(process.lineage)))

    def reduce(self, process: Process) -> None:
        """One reduction of the process's group; everybody will apply its step."""
        switch = process.entered
        if switch is None or process.formed != switch.generation:
            return
        group = self.peers(switch)
        if not self._linked(group) or not all(self._trains(p, switch) for p in group):
            return
        assert len({p.lineage for p in group}) == 1, "members of one generation hold different states"
        assert switch.generation >= self.last_reduced, (
            f"generation {switch.generation} makes progress after {self.last_reduced} did"
        )
        self.last_reduced = switch.generation
        self._commit(group)
        flags = {self._prepared_for(p) for p in group}
        target = next(iter(flags)) if len(flags) == 1 else 0
        for p in group:
            p.reduced = (switch.generation, p.newest if target else None)

    def _commit(self, group: list[Process]) -> None:
        lineage = group[0].lineage
        if len(lineage) >= len(self.committed):
            self.committed = lineage
        for p in group:
            if lineage and lineage[-1] == p.generation and m.Committed not in p.facts:
                self.say(p, m.Committed(generation=p.generation, applied=len(lineage)))

    def _trains(self, p: Process, switch: m.Switch) -> bool:
        here = p.formed == p.generation == switch.generation
        return self._fit(p) and here and not p.broken and not p.waiting and p.reduced is None

    def _prepared_for(self, process: Process) -> int:
        newest = process.newest
        if newest is None or newest.generation <= process.generation or not newest.planned:
            return 0
        if process.name in newest.leavers:
            return newest.generation
        if process.name not in [peer.worker for peer in newest.members]:
            return 0
        group = self.peers(newest)
        near = all(p.running and p.newest is not None and p.newest.generation == newest.generation for p in group)
        return newest.generation if near and self._linked(group) else 0

    def apply(self, process: Process) -> None:
        if process.reduced is None or not self._fit(process):
            return
        generation, target = process.reduced
        process.reduced = None
        process.lineage += (generation,)
        self.applied.append((len(process.lineage), generation))
        if target is None:
            return
        if process.name in [peer.worker for peer in target.members]:
            self._enter(process, target)
        else:
            process.waiting = True
        self._consider(process)

    def notice_broken(self, process: Process) -> None:
        """Its group cannot work: a peer is gone, or has gone elsewhere, or a link is dead."""
        switch = process.entered
        if switch is None or not self._fit(process) or process.broken or process.waiting:
            return
        group = self.peers(switch)
        gone = [p for p in group if not p.alive or p.out or p.generation > switch.generation or p.broken or p.waiting]
        dead = [p for p in group if {p.name, process.name} in self.broken_links]
        # A peer that went on only after the last collective is not missed: its part in it was done.
        done = process.reduced is not None or process.received is not None
        killed = [p for p in gone if not p.alive or p.out]
        if not dead and not (killed if done else gone):
            return
        process.broken, process.reduced, process.received = True, None, None
        suspects = tuple(p.name for p in dead)
        self.say(process, m.Broken(generation=switch.generation, cause="connection reset", suspects=suspects))

    def save(self, process: Process) -> None:
        """A checkpoint of what is committed; only members that are not out write."""
        if self._fit(process) and process.holds and process.formed == self.last_reduced and not process.waiting:
            self.checkpoint = self.committed

    # Time.

    def advance(self, seconds: float) -> None:
        """Heartbeats are said, leases run out, and the coordinator is woken when it asked for it."""
        until_s = self.now_s + seconds
        while True:
            due_s = min(wake_s(self.state, self.now_s), self.beat_s, until_s)
            self.now_s = max(self.now_s, due_s)
            if self.now_s >= self.beat_s:
                self._beat()
                self.beat_s = self.now_s + self.settings.heartbeat_s
            self.tell(c.Tick())
            if self.now_s >= until_s:
                return

    def _beat(self) -> None:
        for p in self.processes.values():
            if (self._fit(p) or p.stuck) and p.connection is not None:
                applied = len(p.lineage)
                self.say(p, m.Heartbeat(generation=p.generation, loop=0, step=applied, applied=applied))

    # All at once, for when order does not matter.

    def everything(self) -> Iterator[Callable[[], None]]:
        """Each thing that workers and wires do when nothing is in their way."""
        for p in list(self.processes.values()):
            for act in (self.connect, self.get_ready, self.notice_broken, self.exchange, self.take_in):
                yield lambda act=act, p=p: act(p)  # type: ignore[misc]
            yield lambda p=p: self.drain(p)  # type: ignore[misc]
            for act in (self.apply, self.reduce):
                yield lambda act=act, p=p: act(p)  # type: ignore[misc]

    def drain(self, process: Process) -> None:
        while process.to_coordinator and process.connection is not None and not process.cut_off:
            self.deliver_up(process)
        while process.from_coordinator and process.running and not process.cut_off:
            self.deliver_down(process)

    def round(self, seconds: float = 0.1) -> None:
        while self.closing:
            self.notice_closed()
        for act in self.everything():
            act()
        self.advance(seconds)
        for p in self.processes.values():
            if p.out and p.alive:
                self.kill(p)

    def run(self, until: Callable[[], bool], rounds: int = 2000, seconds: float = 0.1) -> None:
        for _ in range(rounds):
            if until():
                return
            self.round(seconds)
        raise AssertionError("this never happened:\n" + "\n".join(self.log[-30:]))

    # What must hold.

    def audit(self) -> None:
        """A step counts in the highest generation in which anybody applied it: that is what survived."""
        highest: dict[int, int] = {}
        for step, generation in self.applied:
            highest[step] = max(generation, highest.get(step, 0))
        final = max((p.lineage for p in self.members()), key=len, default=())
        assert [highest[k] for k in range(1, len(final) + 1)] == list(final)

    def members(self) -> list[Process]:
        gen = self.state.active
        return [self.processes[name] for name in self.state.names(gen.members)] if gen else []

    def training(self, size: int) -> bool:
        """A generation of this size is formed, and has committed."""
        gen = self.state.active
        there = all(p.running for p in self.members())
        return gen is not None and gen.complete and gen.committed and len(gen.members) == size and there
