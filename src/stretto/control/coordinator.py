"""The coordinator of one job: who is in, as a pure state machine.

`handle(state, event, now_s)` gives the next state and the effects, to be carried out in their order: what is
journalled must be on disk before what follows it is sent. Time is an input; `wake_s` says when a `Tick` is due.

After every event the same questions are asked of the state, so that no order of events is special:

1. Whose lease has run out?
2. Is everybody at the end of a loop, or has somebody left it alone? Has everybody finished?
3. Does the active generation miss somebody, is it broken, or not formed in time? Then an *unplanned* generation of
   those who are there, at once. If nobody who is there holds state: wait, and only when all that might hold it are
   confirmed to have ended, begin anew with newcomers (who restore the checkpoint).
4. Otherwise: is another membership wanted? Then a *planned* one. A newer proposal replaces one that nobody has formed;
   mere growth waits for the one under way.
5. Which leavers does nobody need any more?

What a worker must do in turn: say hello first on every connection; repeat on a new one what still holds (ready,
formed, committed, broken, loop end); only ever go to a higher generation. A member that reports a generation broken is
in no group any more, and follows the next unplanned list; one that could only not prepare a proposal trains on and says
nothing. A newcomer follows every list; it waits in its first loop until it is a member, and never runs its script's
tail before.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stretto.control import lists
from stretto.control.events import (
    Announced,
    Closed,
    Done,
    Drop,
    Effect,
    Event,
    Evicted,
    Exited,
    Failed,
    Formed,
    Journal,
    Progress,
    Received,
    Refuse,
    Send,
    Slept,
    Tick,
    Want,
)
from stretto.control.journal import Record, generation_record, out_record
from stretto.control.roster import Generation, Settings, State, Worker, unique
from stretto.runtime import messages as m

_PATIENCE = 3
"""A proposal that the members passed by for so many formation times is made again."""


def begin(settings: Settings) -> State:
    """The state of a job that nobody has joined yet."""
    return State(settings=settings, want=settings.want)


def handle(state: State, event: Event, now_s: float) -> tuple[State, tuple[Effect, ...]]:
    """What follows from an event."""
    turn = _Turn(state, now_s)
    match event:
        case Received(connection, message):
            _received(turn, connection, message)
        case Closed(connection):
            _closed(turn, connection)
        case Exited(name, incarnation):
            _exited(turn, name, incarnation)
        case Want():
            _wanted(turn, event)
        case Slept(seconds):
            for key, worker in state.workers.items():
                turn.update(key, heard_s=worker.heard_s + seconds)
        case Tick():
            pass
    _settle(turn)
    return turn.state, tuple(turn.effects)


def wake_s(state: State, now_s: float) -> float:
    """When a `Tick` is due though nothing happens: always later than now, and infinite if never."""
    if state.failed or state.done:
        return math.inf
    settings, gen, newest = state.settings, state.active, state.newest
    times = [state.lost_s(w) for w in state.workers.values() if not w.gone]
    times += [state.lease_ends_s(w) for w in state.workers.values() if _leased(state, w)]
    if gen is not None and newest is not None:
        times += [t for g in (gen, newest) if (t := _due_s(state, g)) is not None]
        times += [w.at_end_s + settings.formation_s for w in _breakers(state, gen)]
        times += [newest.announced_s + wait * settings.formation_s for wait in (1, _PATIENCE)]
    return min((t for t in times if t > now_s), default=math.inf)


class _Turn:
    """The state under change within one event, and the effects so far."""

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def journal(self, record: Record) -> None:
        self.effects.append(Journal(record))

    def send(self, key: str, message: m.Message) -> None:
        """To a worker that cannot be reached nothing is sent: it gets what holds when it comes back."""
        worker = self.state.workers[key]
        if worker.connection is not None:
            self.effects.append(Send(worker.connection, worker.name, message))

    def update(self, key: str, **changes: object) -> Worker:
        worker = replace(self.state.workers[key], **changes)  # type: ignore[arg-type]
        self.state = self.state.with_worker(worker)
        return worker

    def change(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def change_generation(self, gen: Generation, **changes: object) -> Generation:
        changed = replace(gen, **changes)  # type: ignore[arg-type]
        self.state = self.state.with_generation(changed)
        return changed


# What was heard.


def _received(turn: _Turn, connection: int, message: m.Message) -> None:
    if isinstance(message, m.Hello):
        _hello(turn, connection, message)
        return
    worker = turn.state.on(connection)
    if worker is None:
        turn.effects.append(Refuse(connection, "a worker says hello first"))
        return
    key = worker.incarnation
    if worker.out:
        turn.send(key, m.Evict(reason=worker.out))
        return
    turn.update(key, heard_s=turn.now_s)
    match message:
        case m.Ready():
            _ready(turn, key, message)
        case m.Formed():
            _formed(turn, key, message.generation, message.applied)
        case m.Committed():
            _formed(turn, key, message.generation, message.applied)
            _committed(turn, message.generation)
        case m.Broken():
            _broken(turn, key, message)
        case m.Heartbeat():
            _heartbeat(turn, key, message)
        case m.LoopEnd():
            _loop_end(turn, key, message)
        case m.Bye():
            _bye(turn, key, message)
        case _:
            turn.effects.append(Refuse(connection, f"{type(message).__name__} is not for a worker to say"))


def _hello(turn: _Turn, connection: int, hello: m.Hello) -> None:
    problem = _objection(turn, hello)
    if problem:
        turn.effects.append(Refuse(connection, problem))
        return
    known = turn.state.workers.get(hello.incarnation)
    if known is None:
        known = _register(turn, hello)
    elif known.connection is not None and known.connection != connection:
        turn.effects.append(Drop(known.connection))
    turn.update(
        known.incarnation,
        connection=connection,
        address=hello.address,
        heard_s=turn.now_s if not known.out else known.heard_s,
        applied=max(known.applied, hello.applied),
        generation=hello.generation,
        holds_state=known.holds_state
        or (hello.holds_state and any(g.concerns(known.incarnation) for g in turn.state.open)),
    )
    _tell_all(turn, known.incarnation)


def _objection(turn: _Turn, hello: m.Hello) -> str:
    """Why this hello cannot be accepted; empty if it can."""
    state = turn.state
    if not hmac.compare_digest(hello.token.encode(), state.settings.token.encode()):
        return "the token is wrong: a worker needs the secret of its own job (STRETTO_TOKEN)"
    if hello.protocol != m.PROTOCOL:
        return f"the worker speaks protocol {hello.protocol}, the coordinator {m.PROTOCOL}: install the same version"
    known = state.workers.get(hello.incarnation)
    if known is not None:
        return "" if known.name == hello.worker else f"incarnation {hello.incarnation} belongs to {known.name!r}"
    namesake = state.named(hello.worker)
    if namesake is not None and not namesake.ended and turn.now_s < state.lease_ends_s(namesake):
        return (
            f"worker {hello.worker!r} exists already (another process, at {namesake.address}): "
            "give every worker its own name, or wait until the other one is confirmed to have ended"
        )
    if hello.generation > 0:
        return f"worker {hello.worker!r} is in generation {hello.generation}, of which this job knows nothing"
    return ""


def _register(turn: _Turn, hello: m.Hello) -> Worker:
    state = turn.state
    worker = Worker(
        name=hello.worker,
        incarnation=hello.incarnation,
        address=hello.address,
        order=state.joined + 1,
        heard_s=turn.now_s,
    )
    turn.state = replace(state.with_worker(worker), joined=worker.order)
    if worker.name in state.unexpected:
        turn.change(leaving=state.leaving | {worker.incarnation}, unexpected=state.unexpected - {worker.name})
        turn.journal(_want_record(turn.state))
    return worker


def _tell_all(turn: _Turn, key: str) -> None:
    """Everything that holds for a worker that has just come (back)."""
    state = turn.state
    worker, gen, newest = state.workers[key], state.active, state.newest
    if worker.out:
        turn.send(key, m.Evict(reason=worker.out))
        return
    turn.send(key, _welcome(state))
    if state.failed:
        turn.send(key, m.Fail(text=state.failed))
    elif worker.released or state.done:
        turn.send(key, m.Release())
    else:
        for each in {g.number: g for g in (gen, newest) if g is not None}.values():
            if each.concerns(key) and each.number > worker.generation:
                turn.send(key, _switch(state, each))


def _welcome(state: State) -> m.Welcome:
    return m.Welcome(
        generation=state.active.number if state.active else 0,
        loops_done=state.loops_done,
        heartbeat_s=state.settings.heartbeat_s,
        lease_s=state.settings.lease_s,
    )


def _switch(state: State, gen: Generation) -> m.Switch:
    peers = (state.workers[key] for key in gen.members)
    return m.Switch(
        generation=gen.number,
        members=tuple(m.Peer(worker=w.name, address=w.address) for w in peers),
        leavers=state.names(gen.leavers),
        planned=gen.planned,
        loops_done=state.loops_done,
    )


def _ready(turn: _Turn, key: str, message: m.Ready) -> None:
    state, worker = turn.state, turn.state.workers[key]
    if not state.fingerprint_of:
        turn.change(fingerprint=dict(message.fingerprint), fingerprint_of=worker.name)
        turn.journal({"kind": "fingerprint", "fingerprint": dict(message.fingerprint), "worker": worker.name})
    elif dict(message.fingerprint) != dict(state.fingerprint):
        text = _difference(state, worker, message.fingerprint)
        if any(g.taken_s is not None for g in state.open):
            _evict(turn, key, text)
        else:
            _fail(turn, text)
        return
    turn.update(key, ready=True)


def _difference(state: State, worker: Worker, fingerprint: dict[str, str]) -> str:
    mine, theirs = state.fingerprint, fingerprint
    fields = [name for name in unique((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
    told = ", ".join(
        f"{name} is {theirs.get(name, 'not there')} on {worker.name} and {mine.get(name, 'not there')} "
        f"on {state.fingerprint_of}"
        for name in fields
    )
    return f"the workers of the job differ: {told}; all must run the same script with the same model and data"


def _formed(turn: _Turn, key: str, number: int, applied: int) -> None:
    """Whoever formed a generation was connected to all its members: none of them is in a lower one any more."""
    gen = next((g for g in turn.state.open if g.number == number), None)
    if gen is None or key not in gen.members:
        return
    worker = turn.state.workers[key]
    turn.update(key, holds_state=True, generation=max(worker.generation, number), applied=max(worker.applied, applied))
    if gen.taken_s is None:
        gen = replace(gen, taken_s=turn.now_s)
        turn.change(open=tuple(g for g in turn.state.open if g.number >= number))
        for each in gen.members:
            turn.update(each, member_of=number)
        turn.journal({"kind": "formed", "number": number, "applied": applied, "by": key})
    was_complete = gen.complete
    gen = turn.change_generation(gen, taken_s=gen.taken_s, formed=gen.formed | {key}, start=max(gen.start, applied))
    if gen.complete and not was_complete:
        turn.effects.append(Formed(number, turn.state.names(gen.members), gen.start))


def _committed(turn: _Turn, number: int) -> None:
    for gen in turn.state.open:
        if gen.number == number and gen.taken_s is not None and not gen.committed:
            turn.change_generation(gen, committed=True, attempt=0)


def _broken(turn: _Turn, key: str, message: m.Broken) -> None:
    for gen in turn.state.open:
        if gen.number == message.generation and gen.concerns(key):
            _note_broken(turn, gen, key, message.suspects)
    active = turn.state.active
    if active is None or key not in active.members or message.generation <= active.number:
        return
    # A member that went ahead into a proposal has left the active generation for good.
    _note_broken(turn, active, key, ())
    left, newest = turn.state.active, turn.state.newest
    if left is not None and newest is not None and message.generation < newest.number:
        # Whoever it missed there was lost, or called elsewhere by a newer list: nothing to wait for.
        turn.change_generation(left, broken_s=turn.now_s - turn.state.settings.grace_s)


def _note_broken(turn: _Turn, gen: Generation, key: str, names: Iterable[str]) -> None:
    named = {w.incarnation for name in names if (w := turn.state.named(name)) is not None}
    suspects = gen.suspects.get(key, frozenset()) | (named & set(gen.members)) - {key}
    since_s = turn.now_s if gen.broken_s is None else gen.broken_s
    turn.change_generation(gen, suspects={**gen.suspects, key: frozenset(suspects)}, broken_s=since_s)


def _heartbeat(turn: _Turn, key: str, beat: m.Heartbeat) -> None:
    worker = turn.state.workers[key]
    turn.update(key, loop=beat.loop, step=beat.step, applied=max(worker.applied, beat.applied))
    turn.send(key, m.Alive())
    _infer_commit(turn)
    turn.effects.append(Progress(worker.name, beat, turn.state.committed))


def _infer_commit(turn: _Turn) -> None:
    """The first commit may have gone untold: whoever is two steps on proves it, and so do all together."""
    gen = turn.state.active
    if gen is None or not gen.complete or gen.committed:
        return
    applied = [turn.state.workers[key].applied for key in gen.members]
    if max(applied) >= gen.start + 2 or min(applied) > gen.start:
        _committed(turn, gen.number)


def _loop_end(turn: _Turn, key: str, message: m.LoopEnd) -> None:
    if message.loop < turn.state.loops_done:
        turn.send(key, m.End(loop=message.loop))
        return
    _formed(turn, key, message.generation, message.applied)
    worker = turn.state.workers[key]
    if worker.at_end is None or worker.at_end != message:
        turn.update(key, at_end=message, at_end_s=turn.now_s, applied=max(worker.applied, message.applied))


def _bye(turn: _Turn, key: str, message: m.Bye) -> None:
    worker = turn.state.workers[key]
    if message.reason == "finished":
        _gone(turn, key, "its script has ended", finished=True)
    elif message.reason == "error" and _matters(turn.state, key):
        _gone(turn, key, "its script raised an error")
        _fail(turn, f"worker {worker.name} failed: {message.text}")
    elif message.reason == "error":
        _gone(turn, key, "its script raised an error")
        turn.effects.append(Evicted(worker.name, message.text))
    else:
        _gone(turn, key, "it left")


def _matters(state: State, key: str) -> bool:
    """An error of a newcomer must not end a job that runs well without it."""
    gen = state.active
    return gen is None or gen.taken_s is None or key in gen.members


# What happened to a worker.


def _closed(turn: _Turn, connection: int) -> None:
    worker = turn.state.on(connection)
    if worker is not None:
        turn.update(worker.incarnation, connection=None, away_s=turn.now_s)


def _exited(turn: _Turn, name: str, incarnation: str) -> None:
    worker = turn.state.workers.get(incarnation) if incarnation else turn.state.named(name)
    if worker is not None and not worker.ended:
        _gone(turn, worker.incarnation, "its process has ended")


def _gone(turn: _Turn, key: str, reason: str, *, finished: bool = False) -> None:
    """It is certain that the process does nothing any more."""
    worker = turn.state.workers[key]
    worker = turn.update(key, ended=True, out=worker.out or reason, finished=finished or worker.finished)
    turn.journal(out_record(worker))


def _evict(turn: _Turn, key: str, reason: str) -> None:
    """The job goes on without it, though it may still run somewhere."""
    worker = turn.state.workers[key]
    if worker.out:
        return
    worker = turn.update(key, out=reason)
    turn.journal(out_record(worker))
    turn.send(key, m.Evict(reason=reason))
    turn.effects.append(Evicted(worker.name, reason))


def _wanted(turn: _Turn, want: Want) -> None:
    state = turn.state
    known = {w.name: w.incarnation for w in sorted(state.workers.values(), key=lambda w: w.order) if not w.gone}
    leaving = set(state.leaving) | {known[name] for name in want.leavers if name in known}
    unexpected = set(state.unexpected) | {name for name in want.leavers if state.named(name) is None}
    size = state.want if want.size is None else max(1, want.size)
    if size < state.want:
        leaving |= set(_surplus(state, leaving, size))
    if size == state.want and leaving <= state.leaving and unexpected <= state.unexpected:
        return
    turn.change(want=size, leaving=frozenset(leaving), unexpected=frozenset(unexpected))
    turn.journal(_want_record(turn.state))


def _surplus(state: State, leaving: set[str], size: int) -> list[str]:
    """Who goes when only a size is given: newcomers first, then the latest to have joined."""
    inside = set(state.active.members) if state.active else set()
    staying = [w for key, w in state.workers.items() if not w.gone and not w.released and key not in leaving]
    staying.sort(key=lambda w: (w.incarnation not in inside, w.order))
    return [w.incarnation for w in staying[size:]]


def _want_record(state: State) -> Record:
    return {
        "kind": "want",
        "size": state.want,
        "leaving": sorted(state.leaving),
        "unexpected": sorted(state.unexpected),
    }


# What follows.


def _settle(turn: _Turn) -> None:
    if turn.state.failed or turn.state.done:
        return
    _let_leases_end(turn)
    _judge_loop(turn)
    _judge_end(turn)
    if turn.state.failed or turn.state.done:
        return
    if not _repair(turn):
        _propose(turn)
    _release(turn)


def _leased(state: State, worker: Worker) -> bool:
    """Its lease may decide something: it is unreachable and not confirmed to have ended."""
    return not worker.ended and any(g.concerns(worker.incarnation) for g in state.open)


def _let_leases_end(turn: _Turn) -> None:
    for key, worker in turn.state.workers.items():
        unheard = bool(worker.out) or turn.state.lost(key, turn.now_s)
        if _leased(turn.state, worker) and unheard and turn.now_s >= turn.state.lease_ends_s(worker):
            _gone(turn, key, "its lease has run out")
            turn.send(key, m.Evict(reason="its lease has run out"))


# The end of a loop, and of the job.


def _breakers(state: State, gen: Generation) -> list[Worker]:
    return [w for w in _at_end(state, gen) if w.at_end is not None and w.at_end.how == "break"]


def _at_end(state: State, gen: Generation) -> list[Worker]:
    """Members that wait at the end of the loop under way."""
    members = [state.workers[key] for key in gen.members]
    return [
        w
        for w in members
        if w.at_end is not None and w.at_end.generation == gen.number and w.at_end.loop == state.loops_done
    ]


def _judge_loop(turn: _Turn) -> None:
    state, gen = turn.state, turn.state.active
    if gen is None or not gen.complete:
        return
    ended = _at_end(state, gen)
    going = [w for key in gen.members if (w := state.workers[key]) not in ended and not w.finished]
    places = {w.at_end.applied for w in ended if w.at_end is not None}
    if ended and not going and len(places) == 1:
        _end_loop(turn, gen)
    elif (ended and not going) or _left_alone(turn, gen, going):
        _fail(turn, _disagreement(ended, going))


def _left_alone(turn: _Turn, gen: Generation, going: list[Worker]) -> bool:
    """Somebody has broken out of the loop, and others are beyond that step or do not follow in time."""
    breakers = _breakers(turn.state, gen)
    if not breakers:
        return False
    first_s = min(w.at_end_s for w in breakers)
    if turn.now_s >= first_s + turn.state.settings.formation_s:
        return all(turn.state.reachable(w.incarnation, turn.now_s) for w in going)
    steps = [w.at_end.step for w in breakers if w.at_end is not None and w.at_end.step >= 0]
    return any(w.loop == turn.state.loops_done and steps and w.step > min(steps) for w in going)


def _disagreement(ended: list[Worker], going: list[Worker]) -> str:
    told = [f"{w.name} left it ({w.at_end.how}) after step {w.at_end.applied}" for w in ended if w.at_end is not None]
    told += [f"{w.name} goes on after step {w.applied}" for w in going]
    return (
        f"not all workers left the loop at the same step: {', '.join(told)}; "
        "call job.stop() to end a loop early: it ends it for all at the same step"
    )


def _end_loop(turn: _Turn, gen: Generation) -> None:
    loop = turn.state.loops_done
    turn.change(loops_done=loop + 1)
    turn.journal({"kind": "loops", "done": loop + 1})
    _committed(turn, gen.number)
    for key in gen.members:
        turn.update(key, at_end=None)
        turn.send(key, m.End(loop=loop))


def _judge_end(turn: _Turn) -> None:
    state, gen = turn.state, turn.state.active
    if state.failed or gen is None:
        return
    members = [state.workers[key] for key in gen.members]
    if any(w.finished for w in members) and all(w.ended for w in members):
        turn.change(done=True)
        turn.journal({"kind": "done"})
        for key, worker in state.workers.items():
            if not worker.gone:
                turn.send(key, m.Release())
        turn.effects.append(Done())


def _fail(turn: _Turn, reason: str) -> None:
    if turn.state.failed or turn.state.done:
        return
    turn.change(failed=reason)
    turn.journal({"kind": "failed", "reason": reason})
    for key, worker in turn.state.workers.items():
        if not worker.gone:
            turn.send(key, m.Fail(text=reason))
    turn.effects.append(Failed(reason))


# Unplanned: somebody is missing, or the group is broken.


def _repair(turn: _Turn) -> bool:
    """Whether the active generation (or that there is none) needed something, done or waited for."""
    state, gen = turn.state, turn.state.active
    if gen is None:
        _start(turn, "the first")
        return True
    missing = [key for key in gen.members if state.lost(key, turn.now_s) and not state.workers[key].finished]
    due_s = _due_s(state, gen)
    if not missing and due_s is None:
        return False
    if not all(state.reachable(key, turn.now_s) or state.lost(key, turn.now_s) for key in gen.members):
        return True  # After a restart: who has not come back yet may hold the latest state.
    if missing:
        _regroup(turn, gen, f"lost {', '.join(state.names(missing))}", 0)
    elif due_s is not None and turn.now_s >= due_s:
        _form_again(turn, gen)
    return True


def _due_s(state: State, gen: Generation) -> float | None:
    """When something must be done about a generation that is broken or not complete."""
    times = []
    if gen.broken_s is not None:
        times.append(gen.broken_s + state.settings.grace_s)
    if not gen.complete and (not gen.planned or gen.taken_s is not None):
        times.append((gen.taken_s if gen.planned and gen.taken_s else gen.announced_s) + state.settings.formation_s)
    return min(times, default=None)


def _form_again(turn: _Turn, gen: Generation) -> None:
    overdue = gen.broken_s is None
    superseded = turn.state.newest is not gen
    if gen.attempt > 0 or (overdue and not superseded):
        for key in lists.culprits(turn.state, gen, frozenset()):
            _evict(turn, key, f"generation {gen.number} could not be formed with it")
    _regroup(turn, gen, "not formed in time" if overdue else "broken", gen.attempt + 1)


def _regroup(turn: _Turn, gen: Generation, why: str, attempt: int) -> None:
    """An unplanned generation of everybody who is there; without one that is sound, wait or start anew."""
    members = lists.survivors(turn.state, gen, turn.now_s)
    if members is not None:
        _give_up_lost(turn, gen, why)
        _announce(turn, members, planned=False, attempt=attempt, why=why)
    elif lists.nobody_left(turn.state, turn.now_s):
        _start(turn, f"{why}; nobody who held state is left")


def _give_up_lost(turn: _Turn, gen: Generation, why: str) -> None:
    for key in gen.members:
        if turn.state.lost(key, turn.now_s) and not turn.state.workers[key].finished:
            _evict(turn, key, f"generation {turn.state.number + 1} goes on without it: {why}")


def _start(turn: _Turn, why: str) -> None:
    """A generation of newcomers only; its leader restores the checkpoint if there is one."""
    state, gen = turn.state, turn.state.active
    inside = [key for key in gen.members if state.usable(key, turn.now_s)] if gen else []
    there = [*(key for key in inside if key not in state.leaving), *state.newcomers(turn.now_s)]
    chosen = there[: max(state.want, state.settings.min_workers)]
    if len(there) >= state.settings.min_workers and state.fenced(set(chosen)):
        if gen is not None:
            _give_up_lost(turn, gen, why)
        _announce(turn, chosen, planned=False, attempt=0, why=why)


# Planned.


def _propose(turn: _Turn) -> None:
    gen, newest, now_s = turn.state.active, turn.state.newest, turn.now_s
    if gen is None or newest is None or not gen.complete:
        return
    if not all(turn.state.reachable(key, now_s) for key in gen.members):
        return
    if not all(turn.state.reachable(key, now_s) or turn.state.lost(key, now_s) for key in newest.members):
        return  # After a restart: who was proposed may still come back.
    again = newest is not gen and (_proposal_failed(turn, gen, newest) or _passed_by(turn, gen, newest))
    state = turn.state
    members = lists.target(state, gen, newest, now_s)
    # A proposal made when a member of today was no member yet does not tell it to leave: nobody would ever take it.
    told = all(newest.concerns(key) for key in gen.members)
    if set(members) == set(newest.members) and told and not again:
        return
    # Who is being connected is not called elsewhere for mere growth, except when that takes too long.
    patient = newest is not gen and told and not again and now_s < newest.announced_s + state.settings.formation_s
    if patient and set(members) > set(newest.members):
        return
    if members:
        attempt = newest.attempt + 1 if again else 0
        _announce(turn, members, planned=True, attempt=attempt, why=lists.reason(state, newest, members))


def _passed_by(turn: _Turn, gen: Generation, newest: Generation) -> bool:
    """The members have gone on for long without taking the proposal: somebody could not prepare for it."""
    applied = min(turn.state.workers[key].applied for key in gen.members)
    long = turn.now_s >= newest.announced_s + _PATIENCE * turn.state.settings.formation_s
    return long and applied >= newest.start + 2


def _proposal_failed(turn: _Turn, gen: Generation, newest: Generation) -> bool:
    """Try once more, then without a newcomer. The members train on meanwhile and are not to blame."""
    settings = turn.state.settings
    if newest.broken_s is None or turn.now_s < newest.broken_s + settings.grace_s:
        return False
    if newest.attempt == 0:
        return True
    culprits = lists.culprits(turn.state, newest, frozenset(gen.members))
    for key in culprits:
        _evict(turn, key, f"generation {newest.number} could not be formed with it")
    return bool(culprits) or turn.now_s >= newest.announced_s + settings.formation_s


def _announce(turn: _Turn, members: Sequence[str], *, planned: bool, attempt: int, why: str) -> None:
    state = turn.state
    inside = unique(key for g in state.open for key in (*g.members, *g.leavers))
    leavers = [key for key in inside if key not in members and key in state.leaving]
    gen = Generation(
        number=state.number + 1,
        members=tuple(members),
        leavers=tuple(k for k in leavers if not state.workers[k].gone and not state.workers[k].released),
        start=max((state.workers[key].applied for key in members), default=0),
        planned=planned,
        announced_s=turn.now_s,
        attempt=attempt,
    )
    turn.change(open=(*state.open, gen), number=gen.number)
    turn.journal(generation_record(state, gen))
    told = state.names(gen.members), state.names(gen.leavers)
    turn.effects.append(Announced(gen.number, *told, planned, why))
    for key in (*gen.members, *gen.leavers):
        turn.send(key, _switch(turn.state, gen))


# Leavers.


def _release(turn: _Turn) -> None:
    state, gen = turn.state, turn.state.active
    for key in sorted(state.leaving & set(state.workers), key=lambda key: state.workers[key].order):
        worker = state.workers[key]
        if worker.gone or worker.released or any(key in g.members for g in state.open):
            continue
        needed = any(key in g.leavers for g in state.open)
        if not needed or (gen is not None and gen.complete and gen.committed):
            turn.update(key, released=True)
            turn.send(key, m.Release())
