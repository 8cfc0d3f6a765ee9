"""What workers say once they are known: that they are ready, train, wait at the end of a loop, go."""

from __future__ import annotations

from stretto.control import arrivals, formation, leavers, stuck
from stretto.control.departures import evict, gone
from stretto.control.endings import fail
from stretto.control.events import Evicted, Progress, Refuse, Want
from stretto.control.roster import State, Worker, unique
from stretto.control.turn import Turn
from stretto.runtime import messages as m


def received(turn: Turn, connection: int, message: m.Message) -> None:
    if isinstance(message, m.Hello):
        arrivals.hello(turn, connection, message)
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
            formation.formed(turn, key, message.generation, message.applied)
            formation.in_loop(turn, key, message)
        case m.Committed():
            formation.formed(turn, key, message.generation, message.applied)
            formation.committed(turn, message.generation)
        case m.Broken():
            formation.broken(turn, key, message)
        case m.Heartbeat():
            _heartbeat(turn, key, message)
        case m.LoopEnd():
            _loop_end(turn, key, message)
        case m.Leaving():
            leavers.wanted(turn, Want(None, (worker.name,)))
        case m.Bye():
            _bye(turn, key, message)
        case _:
            turn.effects.append(Refuse(connection, f"{type(message).__name__} is not for a worker to say"))


def _ready(turn: Turn, key: str, message: m.Ready) -> None:
    state, worker = turn.state, turn.state.workers[key]
    if not state.fingerprint_of:
        turn.change(fingerprint=dict(message.fingerprint), fingerprint_of=worker.name)
        turn.journal({"kind": "fingerprint", "fingerprint": dict(message.fingerprint), "worker": worker.name})
    elif any(state.fingerprint.get(name, told) != told for name, told in message.fingerprint.items()):
        text = _difference(state, worker, message.fingerprint)
        if any(g.taken_s is not None for g in state.open):
            evict(turn, key, text)
        else:
            fail(turn, text)
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


def _heartbeat(turn: Turn, key: str, beat: m.Heartbeat) -> None:
    formation.reached(turn, key, beat.generation)
    worker = turn.state.workers[key]
    since_s = turn.now_s if worker.waits_s is None else worker.waits_s
    turn.update(
        key,
        loop=beat.loop,
        step=beat.step,
        applied=max(worker.applied, beat.applied),
        stuck=stuck.bounded(beat.stuck),
        waits_s=since_s if beat.waits else None,
    )
    if beat.epochs and turn.state.active is not None and beat.generation == turn.state.active.number:
        turn.change(epochs=beat.epochs)
    turn.send(key, m.Alive())
    formation.entered(turn, key, beat.generation)
    formation.infer_commit(turn)
    turn.effects.append(Progress(worker.name, beat, turn.state.committed))


def _loop_end(turn: Turn, key: str, message: m.LoopEnd) -> None:
    formation.formed(turn, key, message.generation, message.applied)
    worker = turn.update(key, applied=max(turn.state.workers[key].applied, message.applied))
    if message.loop < turn.state.loops_done:
        turn.send(key, m.End(loop=message.loop))
    elif worker.at_end != message:
        turn.update(key, at_end=message, at_end_s=turn.now_s)


def _bye(turn: Turn, key: str, message: m.Bye) -> None:
    worker = turn.state.workers[key]
    if message.reason == "finished":
        turn.update(key, loops=message.loops)
        gone(turn, key, "its script has ended", finished=True)
    elif message.reason != "error":
        gone(turn, key, "it left")
    else:
        matters = _matters(turn.state, key)
        gone(turn, key, "its script raised an error")
        if matters:
            fail(turn, f"worker {worker.name} failed: {message.text}")
        else:
            turn.effects.append(Evicted(worker.name, message.text))


def _matters(state: State, key: str) -> bool:
    """An error of a newcomer must not end a job that runs well without it."""
    gen = state.active
    return gen is None or gen.taken_s is None or (key in gen.members and state.workers[key].holds_state)
