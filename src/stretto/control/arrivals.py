"""A worker says hello, for the first time or again: may it come in, and what must it be told.

That it knows the job's secret was found out before (`admission.py`)."""

from __future__ import annotations

from dataclasses import replace

from stretto.control import formation
from stretto.control.announcing import switch
from stretto.control.events import Drop, Refuse
from stretto.control.journal import want_record
from stretto.control.roster import Worker
from stretto.control.turn import Turn
from stretto.runtime import messages as m


def hello(turn: Turn, connection: int, said: m.Hello) -> None:
    problem = _objection(turn, said)
    if problem:
        turn.effects.append(Refuse(connection, problem))
        return
    known = turn.state.workers.get(said.incarnation)
    if known is None:
        known = _register(turn, said)
    elif known.connection is not None and known.connection != connection:
        turn.effects.append(Drop(known.connection))
    turn.update(
        known.incarnation,
        connection=connection,
        address=said.address,
        heard_s=turn.now_s if not known.out else known.heard_s,
        applied=max(known.applied, said.applied),
        holds_state=known.holds_state
        or (said.holds_state and any(g.concerns(known.incarnation) for g in turn.state.open)),
    )
    formation.reached(turn, known.incarnation, said.generation)
    _tell_all(turn, known.incarnation)


def _objection(turn: Turn, said: m.Hello) -> str:
    """Why this hello cannot be accepted; empty if it can."""
    state = turn.state
    if said.protocol != m.PROTOCOL:
        return f"the worker speaks protocol {said.protocol}, the coordinator {m.PROTOCOL}: install the same version"
    known = state.workers.get(said.incarnation)
    if known is not None:
        return "" if known.name == said.worker else f"incarnation {said.incarnation} belongs to {known.name!r}"
    namesake = state.named(said.worker)
    ended = namesake is None or namesake.exited or namesake.ended
    if namesake is not None and not ended and turn.now_s < state.lease_ends_s(namesake):
        return (
            f"worker {said.worker!r} exists already (another process, at {namesake.address}): "
            "give every worker its own name, or wait until the other one is confirmed to have ended"
        )
    if said.generation > 0:
        return f"worker {said.worker!r} is in generation {said.generation}, of which this job knows nothing"
    return ""


def _register(turn: Turn, said: m.Hello) -> Worker:
    state = turn.state
    worker = Worker(
        name=said.worker,
        incarnation=said.incarnation,
        address=said.address,
        order=state.joined + 1,
        heard_s=turn.now_s,
    )
    turn.state = replace(state.with_worker(worker), joined=worker.order)
    if worker.name in state.unexpected:
        turn.change(leaving=state.leaving | {worker.incarnation}, unexpected=state.unexpected - {worker.name})
        turn.journal(want_record(turn.state))
    return worker


def _tell_all(turn: Turn, key: str) -> None:
    """Everything that holds for a worker that has just come (back)."""
    state = turn.state
    worker, gen = state.workers[key], state.active
    if worker.out:
        turn.send(key, m.Evict(reason=worker.out))
        return
    welcome = m.Welcome(
        generation=gen.number if gen else 0,
        loops_done=state.loops_done,
        epochs=state.epochs,
        heartbeat_s=state.settings.heartbeat_s,
        lease_s=state.settings.lease_s,
        size=len(gen.members) if gen else 0,
        leads=state.leads(key),
    )
    turn.send(key, welcome)
    if state.failed:
        turn.send(key, m.Fail(text=state.failed))
    elif worker.released or state.done:
        turn.send(key, m.Release())
    else:
        for each in {g.number: g for g in (gen, state.newest) if g is not None}.values():
            if each.concerns(key) and each.number > worker.generation:
                turn.send(key, switch(state, each))
