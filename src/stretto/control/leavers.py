"""Who is to leave, and when nobody needs them any more."""

from __future__ import annotations

from stretto.control.events import Want
from stretto.control.journal import want_record
from stretto.control.roster import State
from stretto.control.turn import Turn
from stretto.runtime.messages import Release


def wanted(turn: Turn, want: Want) -> None:
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
    turn.journal(want_record(turn.state))


def _surplus(state: State, leaving: set[str], size: int) -> list[str]:
    """Who goes when only a size is given: newcomers first, then the latest to have joined."""
    inside = set(state.active.members) if state.active else set()
    staying = [w for key, w in state.workers.items() if not w.gone and not w.released and key not in leaving]
    staying.sort(key=lambda w: (w.incarnation not in inside, w.order))
    return [w.incarnation for w in staying[size:]]


def release(turn: Turn) -> None:
    """Whoever is on no list, and holds no state that the newest members may still lack."""
    state, gen = turn.state, turn.state.active
    for key in sorted(state.leaving & set(state.workers), key=lambda key: state.workers[key].order):
        worker = state.workers[key]
        if worker.gone or worker.released or any(key in g.members for g in state.open):
            continue
        needed = any(key in g.leavers for g in state.open)
        if not needed or (gen is not None and gen.complete and gen.committed):
            turn.update(key, released=True)
            turn.send(key, Release())
