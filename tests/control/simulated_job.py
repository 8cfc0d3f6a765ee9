"""A job in one thread: the real state machine, and a small model of workers that train, die, freeze and lose messages.

What a reduction, a formation and the end of a loop need of their members is modelled exactly; when anything happens is
left to the caller. What must never happen is asserted where it would happen; `watch` sees every event and effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from simulated_worker import Held, Process

from stretto.control import events as c
from stretto.control.coordinator import begin, handle, wake_s
from stretto.control.journal import Record, kept, replay
from stretto.control.roster import Settings, State
from stretto.runtime import messages as m

SETTINGS = Settings(token="secret", min_workers=1, want=2)
ENDLESS = 10**9


class Job:
    """The world. Every public method is one thing that may happen next; those that cannot happen do nothing."""

    def __init__(self, settings: Settings = SETTINGS, *, loops: int = ENDLESS, loop_steps: int = ENDLESS) -> None:
        self.settings = settings
        self.loops, self.loop_steps = loops, loop_steps
        self.state: State = begin(settings)
        self.up = True
        self.hasty = False
        """Members that have let go of a broken group follow a proposal too, though they should wait for more."""
        self.journal: list[Record] = []
        self.keeps_all = True
        """The journal grows; otherwise it is written anew each time, with what still matters."""
        self.processes: dict[str, Process] = {}
        self.closing: list[tuple[int, list[m.Message], bool]] = []
        """Connections whose end the coordinator has not noticed yet; what may still arrive on them, or surely will."""
        self.broken_links: set[frozenset[str]] = set()
        self.now_s = 0.0
        self.beat_s = 0.0
        self.crash_after: int | None = None
        self.log: list[str] = []
        self.effects: list[c.Effect] = []
        self.watch: Callable[[Job], None] = lambda job: None
        """Called after everything the coordinator was told."""
        self.applied: list[tuple[int, int]] = []
        """Step and generation, for every step that any process applied."""
        self.committed: tuple[int, ...] = ()
        self.checkpoint = Held()
        self.exchanged = 0
        """The highest generation whose members have agreed on a state: no lower one may make progress."""
        self._numbers = itertools.count(1)
        self._names = itertools.count(1)
        self._homes: dict[str, Process] = {}

    # What the coordinator does.

    def tell(self, event: c.Event) -> None:
        if not self.up:
            return
        self.state, effects = handle(self.state, event, self.now_s)
        for done, effect in enumerate(effects):
            if self.crash_after is not None and done >= self.crash_after:
                if not self.keeps_all and any(isinstance(x, c.Journal) for x in effects[:done]):
                    # What was written anew holds those that follow, too.
                    self.effects += [x for x in effects[done:] if isinstance(x, c.Journal)]
                self.restart_coordinator()
                return
            self._carry_out(effect)
        self.watch(self)

    def _carry_out(self, effect: c.Effect) -> None:
        self.effects.append(effect)
        match effect:
            case c.Journal(record):
                self.journal = [*self.journal, record] if self.keeps_all else kept(self.state)
            case c.Send(connection, _, message):
                for process in self.processes.values():
                    if process.connection == connection:
                        process.from_coordinator.append(message)
            case c.Drop(connection):
                for process in self.processes.values():
                    if process.connection == connection:
                        self._hang_up(process)
            case c.Refuse(connection, text):
                assert connection not in [p.connection for p in self.processes.values()], f"refused: {text}"
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
        self.stop_coordinator()
        self.start_coordinator()

    def stop_coordinator(self) -> None:
        self.crash_after = None
        self.up = False
        self.closing.clear()
        for process in self.processes.values():
            self._hang_up(process)

    def start_coordinator(self) -> None:
        if not self.up:
            self.log.append(f"{self.now_s:6.1f}  coordinator restarted")
            self.state = replay(list(self.journal), self.settings, self.now_s)
            self.up = True

    def keep_what_matters(self) -> None:
        """From now on the journal is written anew each time."""
        self.keeps_all = False

    # What happens around it.

    def spawn(self, name: str = "") -> Process:
        """A new process; one with the name of an earlier one has an incarnation of its own."""
        name = name or f"w{next(self._names)}"
        process = Process(name, f"i{len(self._homes)}-{name}", heard_s=self.now_s)
        self.processes[name] = self._homes[process.address] = process
        self.connect(process)
        return process

    def connect(self, process: Process) -> None:
        if self.up and process.talks and not process.cut_off and process.connection is None:
            process.connection = next(self._numbers)
            process.to_coordinator = [process.hello(), *process.facts.values()]
            process.from_coordinator = []

    def cut(self, process: Process, *, orderly: bool = False) -> None:
        """The connection ends; unless it does so in order, what was under way to the coordinator may be lost."""
        if process.connection is not None:
            under_way = [] if process.cut_off else list(process.to_coordinator)
            self.closing.append((process.connection, under_way, orderly))
            self._hang_up(process)

    def _hang_up(self, process: Process) -> None:
        process.connection = None
        process.to_coordinator.clear()
        process.from_coordinator.clear()

    def arrive_late(self) -> None:
        if self.closing and self.closing[0][1]:
            connection, messages, _ = self.closing[0]
            self.tell(c.Received(connection, messages.pop(0)))

    def notice_closed(self) -> None:
        while self.closing and self.closing[0][1] and self.closing[0][2]:
            self.arrive_late()
        if self.closing:
            self.tell(c.Closed(self.closing.pop(0)[0]))

    def kill(self, process: Process) -> None:
        process.alive = False
        self.cut(process)

    def exit(self, process: Process) -> None:
        """Whoever is out ends; one that has a last word waits until it can say it."""
        waits = m.Bye in process.facts and process.connection is None and not process.cut_off
        if process.out and process.alive and not process.frozen and not waits:
            process.alive = False
            self.cut(process, orderly=True)

    def reap(self, process: Process) -> None:
        if not process.alive:
            self.tell(c.Exited(process.name, process.incarnation))

    def say(self, process: Process, message: m.Message) -> None:
        if isinstance(message, (m.Ready, m.Formed, m.Committed, m.Broken, m.LoopEnd, m.Bye)):
            process.facts[type(message)] = message
        if process.connection is not None:
            process.to_coordinator.append(message)

    def repeat(self, process: Process) -> None:
        """Everything it says when it comes back, though the coordinator has heard it."""
        if process.connection is not None:
            process.to_coordinator += process.facts.values()

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
                process.out = f"evicted: {reason}"
            case m.Fail(text=text):
                process.out = f"failed: {text}"
            case m.Release():
                self.say(process, m.Bye(reason="left"))
                process.out = "released"
            case m.End(loop=loop):
                process.loops_done = max(process.loops_done, loop + 1)
            case m.Welcome(loops_done=loops_done):
                process.loops_done = max(process.loops_done, loops_done)
            case m.Switch(loops_done=loops_done):
                # Who holds nothing may be told that the job goes back behind what it was told first.
                process.loops_done = max(process.loops_done, loops_done) if process.holds else loops_done
                if message.generation > max(process.generation, process.newest.generation if process.newest else 0):
                    process.newest = message
                    self.consider(process)

    def consider(self, process: Process) -> None:
        """A list that must be followed at once: not planned, or this worker has nothing to train on meanwhile."""
        newest = process.newest
        if newest is None or newest.generation <= process.generation or not self._looks(process):
            return
        free = not process.holds or (process.broken and self.hasty) or (process.waiting and process.named(newest))
        if newest.planned and not free:
            return
        process.reduced = process.received = None
        if process.named(newest):
            self._enter(process, newest)
        else:
            assert process.name in newest.leavers
            process.waiting = True

    def _looks(self, process: Process) -> bool:
        """Whether the process is anywhere where it sees lists: not in its script's tail, nor on its way there."""
        over = self.at_end(process) and process.loops_done > process.held.loop
        return process.running and not process.stuck and not over and process.held.loop < self.loops

    def _enter(self, process: Process, switch: m.Switch) -> None:
        process.entered, process.broken, process.waiting, process.received = switch, False, False, None
        for kind in (m.Formed, m.Committed, m.Broken, m.LoopEnd):
            process.facts.pop(kind, None)
        if not switch.planned:
            self.say(process, self._heartbeat(process))

    # What workers do among themselves.

    def peers(self, switch: m.Switch) -> list[Process]:
        return [self._homes[peer.address] for peer in switch.members]

    def _fit(self, process: Process) -> bool:
        """Runs, and its lease too: a worker looks at that before everything it does for others."""
        if process.running and self.now_s - process.heard_s > self.settings.lease_s:
            process.out = "lease over"
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
        holders = [p.held for p in group if p.holds]
        best = max(holders, key=lambda held: (len(held.lineage), held.loop), default=self.checkpoint)
        self._check_nothing_lost(best.lineage)
        if not holders:
            self.committed = self.checkpoint.lineage
            self.applied = [(step, generation) for step, generation in enumerate(self.committed, 1)]
        self.exchanged = max(self.exchanged, switch.generation)
        for p in group:
            p.received = (switch.generation, best)

    def _check_nothing_lost(self, lineage: tuple[int, ...]) -> None:
        """A committed step is only undone when everybody who has it is gone, or surely stopped, or has left and is
        behind the end of a loop."""
        undone = [k for k, gen in enumerate(self.committed) if k >= len(lineage) or lineage[k] != gen]
        if not undone:
            return
        ends = [record for record in self.journal if record["kind"] == "loops"]
        for p in self._homes.values():
            has = p.holds and p.lineage[: undone[0] + 1] == self.committed[: undone[0] + 1]
            known = self.state.workers.get(p.incarnation)
            gone = not p.alive or p.out or (known is not None and known.gone)
            behind = p.waiting and len(p.lineage) < max((r.get("applied", 0) for r in ends), default=0)
            assert not has or gone or behind, f"{p.name} has committed step {undone[0] + 1}, which is done again"
        self.committed = lineage[: undone[0]]

    def take_in(self, process: Process) -> None:
        """The exchange is over for this one."""
        if process.received is None or not self._fit(process):
            return
        newcomer = not process.formed
        process.formed, held = process.received
        # A newcomer passes over loops that are over.
        process.held = replace(held, loop=max(held.loop, process.loops_done)) if newcomer else held
        assert len(held.lineage) >= process.held.loop * self.loop_steps, f"{process.name} passes over undone steps"
        process.received, process.holds = None, True
        self.say(process, m.Formed(generation=process.formed, applied=len(held.lineage), loop=held.loop))

    def reduce(self, process: Process) -> None:
        """One reduction of the process's group; everybody will apply its step."""
        switch = process.entered
        if switch is None or process.formed != switch.generation:
            return
        group = self.peers(switch)
        if not self._linked(group) or not all(self._trains(p, switch) for p in group):
            return
        assert len({p.held for p in group}) == 1, "members of one generation hold different states"
        assert switch.generation >= self.exchanged, (
            f"generation {switch.generation} makes progress after {self.exchanged} was formed"
        )
        self._note_committed(process.lineage)
        flags = {self._prepared_for(p) for p in group}
        target = next(iter(flags)) if len(flags) == 1 else 0
        for p in group:
            p.reduced = (switch.generation, p.newest if target else None)

    def _note_committed(self, lineage: tuple[int, ...]) -> None:
        both = min(len(lineage), len(self.committed))
        assert lineage[:both] == self.committed[:both], f"{lineage} is committed after {self.committed} was"
        self.committed = max(lineage, self.committed, key=len)

    def _trains(self, p: Process, switch: m.Switch) -> bool:
        here = p.formed == p.generation == switch.generation
        return self._fit(p) and here and not p.broken and not p.waiting and p.reduced is None and not self.at_end(p)

    def _prepared_for(self, process: Process) -> int:
        newest = process.newest
        if newest is None or newest.generation <= process.generation or not newest.planned:
            return 0
        if not process.named(newest):
            return newest.generation if process.name in newest.leavers else 0
        group = self.peers(newest)
        near = all(p.running and p.newest is not None and p.newest.generation == newest.generation for p in group)
        return newest.generation if near and self._linked(group) else 0

    def apply(self, process: Process) -> None:
        if process.reduced is None or not self._fit(process):
            return
        generation, target = process.reduced
        process.reduced = None
        process.held = replace(process.held, lineage=(*process.lineage, generation))
        self.applied.append((len(process.lineage), generation))
        if m.Committed not in process.facts:
            self.say(process, m.Committed(generation=generation, applied=len(process.lineage)))
        if target is None:
            return
        if process.named(target):
            self._enter(process, target)
        else:
            process.waiting = True
        self.consider(process)

    def notice_broken(self, process: Process) -> None:
        """Its group cannot work: a peer is gone, or has gone elsewhere, or a link is dead."""
        switch = process.entered
        if switch is None or not self._in_group(process):
            return
        group = self.peers(switch)
        gone = [p for p in group if not p.alive or p.out or p.generation > switch.generation or p.broken or p.waiting]
        dead = [p for p in group if {p.name, process.name} in self.broken_links]
        # A peer that went on only after the last collective is not missed: its part in it was done.
        done = process.reduced is not None or process.received is not None
        killed = [p for p in gone if not p.alive or p.out]
        if dead or (killed if done else gone):
            self.report_broken(process, () if process.vague else tuple(p.name for p in dead))

    def report_broken(self, process: Process, suspects: tuple[str, ...]) -> None:
        """It lets go of its group, whatever the reason, and follows the next list."""
        switch = process.entered
        if switch is None or not self._in_group(process):
            return
        process.broken, process.reduced, process.received = True, None, None
        self.say(process, m.Broken(generation=switch.generation, cause="connection reset", suspects=suspects))
        self.consider(process)

    def _in_group(self, process: Process) -> bool:
        """It uses its group at this moment, and would see it break: not so at the end of a loop."""
        rests = self.at_end(process) and process.formed == process.generation
        return self._fit(process) and not process.broken and not process.waiting and not rests

    def save(self, process: Process) -> None:
        """A checkpoint of what is committed; only members that are not out write."""
        if self._fit(process) and process.holds and process.formed == self.exchanged and not process.waiting:
            loop = max(0, len(self.committed) - 1) // self.loop_steps
            self.checkpoint = Held(self.committed, loop)

    # The end of loops, and of the script.

    def at_end(self, process: Process) -> bool:
        return process.holds and len(process.lineage) >= (process.held.loop + 1) * self.loop_steps

    def wait_at_end(self, process: Process) -> None:
        """It has done the last step of its loop, and waits for the others."""
        here = process.formed == process.generation and self._in_loop(process) and self.at_end(process)
        if here and process.reduced is None and process.held.loop >= process.loops_done:
            place = {"loop": process.held.loop, "applied": len(process.lineage), "step": self.loop_steps}
            message = m.LoopEnd(generation=process.generation, **place)
            if process.facts.get(m.LoopEnd) != message:
                self.say(process, message)

    def _in_loop(self, process: Process) -> bool:
        return self._fit(process) and not process.waiting and not process.broken and process.held.loop < self.loops

    def go_on(self, process: Process) -> None:
        """Everybody is at the end of the loop: on to the next one, or to the end of the script."""
        if not self._in_loop(process) or not self.at_end(process) or process.loops_done <= process.held.loop:
            return
        if m.LoopEnd in process.facts:
            self._note_committed(process.lineage)
        process.held = replace(process.held, loop=process.held.loop + 1)
        self.consider(process)

    def finish(self, process: Process) -> None:
        if self._fit(process) and process.holds and process.held.loop >= self.loops:
            assert len(process.lineage) == self.loops * self.loop_steps
            self.say(process, m.Bye(reason="finished"))
            process.out = "finished"

    # Time.

    def advance(self, seconds: float) -> None:
        """Heartbeats are said, leases run out, and the coordinator is woken when it asked for it."""
        until_s = self.now_s + seconds
        while True:
            due_s = min(wake_s(self.state, self.now_s) if self.up else until_s, self.beat_s, until_s)
            self.now_s = max(self.now_s, due_s)
            self._beat()
            self.tell(c.Tick())
            if self.now_s >= until_s:
                return

    def stall(self, seconds: float) -> None:
        """The coordinator does not run for a while; what is said to it meanwhile waits."""
        due_s = wake_s(self.state, self.now_s)
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = max(self.now_s, min(self.beat_s, until_s))
            self._beat()
        if self.now_s - due_s > self.settings.heartbeat_s:
            self.tell(c.Slept(self.now_s - due_s))
        self.tell(c.Tick())

    def _beat(self) -> None:
        if self.now_s < self.beat_s:
            return
        self.beat_s = self.now_s + self.settings.heartbeat_s
        for p in self.processes.values():
            if (self._fit(p) or (p.stuck and p.running)) and p.connection is not None:
                self.say(p, self._heartbeat(p))

    def _heartbeat(self, p: Process) -> m.Heartbeat:
        steps = len(p.lineage)
        return m.Heartbeat(generation=p.generation, loop=p.held.loop, step=steps, applied=steps)

    # All at once, for when order does not matter.

    def everything(self) -> Iterator[Callable[[], None]]:
        """Each thing that workers and wires do when nothing is in their way."""
        before = (self.connect, self.get_ready, self.consider, self.notice_broken, self.exchange, self.take_in)
        after = (self.drain, self.apply, self.wait_at_end, self.go_on, self.finish, self.reduce)
        for p in list(self.processes.values()):
            for act in (*before, *after):
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
            self.exit(p)

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
        return [self._homes[self.state.workers[key].address] for key in gen.members] if gen else []

    def training(self, size: int) -> bool:
        """A generation of this size is formed, and has committed."""
        gen = self.state.active
        there = all(p.running and not p.cut_off for p in self.members())
        return gen is not None and gen.complete and gen.committed and len(gen.members) == size and there
