"""A new generation is made: journalled, then told to everybody it concerns."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.control.events import Announced
from stretto.control.journal import generation_record
from stretto.control.roster import Generation, State, unique
from stretto.control.turn import Turn
from stretto.runtime.messages import Peer, Switch


def announce(turn: Turn, members: Sequence[str], *, planned: bool, attempt: int, why: str) -> None:
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
    turn.effects.append(Announced(gen.number, state.names(gen.members), state.names(gen.leavers), planned, why))
    for key in (*gen.members, *gen.leavers):
        turn.send(key, switch(turn.state, gen))


def switch(state: State, gen: Generation) -> Switch:
    """What a worker is told of a generation."""
    peers = (state.workers[key] for key in gen.members)
    return Switch(
        generation=gen.number,
        members=tuple(Peer(worker=w.name, address=w.address) for w in peers),
        leavers=state.names(gen.leavers),
        planned=gen.planned,
        loops_done=state.loops_done,
        epochs=state.epochs,
        ended=tuple(w.name for w in state.workers.values() if w.finished),
    )
