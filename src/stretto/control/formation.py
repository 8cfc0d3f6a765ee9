"""How far a generation has come, as its members tell: formed, committed, broken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stretto.control.events import Formed
from stretto.control.roster import Generation
from stretto.control.turn import Turn
from stretto.runtime import messages as m


def formed(turn: Turn, key: str, number: int, applied: int) -> None:
    """Whoever formed a generation was connected to all its members: none of them is in a lower one any more."""
    gen = next((g for g in turn.state.open if g.number == number), None)
    if gen is None or key not in gen.members:
        return
    reached(turn, key, number)
    turn.update(key, holds_state=True, applied=max(turn.state.workers[key].applied, applied))
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


def in_loop(turn: Turn, key: str, message: m.Formed) -> None:
    """Whoever is in a loop has the ones before behind it: a state that was restored may be of a later loop."""
    gen = turn.state.active
    here = gen is not None and gen.number == message.generation and key in gen.members
    if here and message.loop > turn.state.loops_done:
        end_loops(turn, message.loop, message.applied)


def end_loops(turn: Turn, done: int, applied: int) -> None:
    """So many loops are over, after so many steps."""
    turn.change(loops_done=done, loops_applied=applied)
    turn.journal({"kind": "loops", "done": done, "applied": applied})


def reached(turn: Turn, key: str, number: int) -> None:
    """A worker says that it is in this generation."""
    if number > turn.state.workers[key].generation:
        turn.update(key, generation=number, entered_s=turn.now_s)


def entered(turn: Turn, key: str, number: int) -> None:
    """A member of the active generation says that it is in a proposal: the others cannot go on without it."""
    active = turn.state.active
    for gen in turn.state.open:
        if active is not None and key in active.members and gen.number == number > active.number:
            turn.change_generation(gen, entered_s=turn.now_s if gen.entered_s is None else gen.entered_s)


def committed(turn: Turn, number: int) -> None:
    for gen in turn.state.open:
        if gen.number == number and gen.taken_s is not None and not gen.committed:
            turn.change_generation(gen, committed=True, attempt=0)


def infer_commit(turn: Turn) -> None:
    """The first commit may have gone untold: whoever is two steps on proves it, and so do all together."""
    gen = turn.state.active
    if gen is None or not gen.complete or gen.committed:
        return
    applied = [turn.state.workers[key].applied for key in gen.members]
    if max(applied) >= gen.start + 2 or min(applied) > gen.start:
        committed(turn, gen.number)


def broken(turn: Turn, key: str, message: m.Broken) -> None:
    reached(turn, key, message.generation)
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


def _note_broken(turn: Turn, gen: Generation, key: str, names: Iterable[str]) -> None:
    named = {w.incarnation for name in names if (w := turn.state.named(name)) is not None}
    suspects = gen.suspects.get(key, frozenset()) | (named & set(gen.members)) - {key}
    since_s = turn.now_s if gen.broken_s is None else gen.broken_s
    turn.change_generation(gen, suspects={**gen.suspects, key: frozenset(suspects)}, broken_s=since_s)
