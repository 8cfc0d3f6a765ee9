"""Somebody is missing, or the group is broken: a generation of those who are there, at once."""

from __future__ import annotations

from stretto.control import lists
from stretto.control.announcing import announce
from stretto.control.departures import evict, evict_culprits
from stretto.control.formation import end_loops
from stretto.control.roster import Generation, State, unique
from stretto.control.turn import Turn


def repair(turn: Turn) -> bool:
    """Whether the active generation (or that there is none) needed something, done or waited for."""
    state, gen = turn.state, turn.state.active
    if gen is None:
        _start(turn, "the first", 0)
        return True
    waited_for = [*gen.members, *(state.ahead.members if state.ahead else ())]
    missing = [key for key in unique(waited_for) if _missing(turn, key)]
    due_s = _due_s(state, gen)
    if not missing and due_s is None:
        return False
    if not all(state.reachable(key, turn.now_s) or state.lost(key, turn.now_s) for key in waited_for):
        return True  # After a restart: who has not come back yet may hold the latest state.
    if missing:
        _regroup(turn, gen, f"lost {', '.join(state.names(missing))}", 0)
    elif due_s is not None and turn.now_s >= due_s:
        _form_again(turn, gen)
    return True


def times_s(state: State) -> list[float]:
    """When a generation that is broken or not complete must be made again."""
    due_s = _due_s(state, state.active) if state.active else None
    return [] if due_s is None else [due_s]


def _missing(turn: Turn, key: str) -> bool:
    return turn.state.lost(key, turn.now_s) and not turn.state.workers[key].finished


def _due_s(state: State, gen: Generation) -> float | None:
    """When something must be done about a generation that is broken or not complete.

    Who is busy in its script is waited for: no list could be formed before it comes. That it is alive its heartbeats
    say, and whether it hangs the watchdog.
    """
    times = []
    if not state.absent(gen):
        if gen.broken_s is not None:
            times.append(gen.broken_s + state.settings.grace_s)
        if not gen.complete:
            times.append(_began_s(state, gen) + state.settings.formation_s)
    if state.ahead is not None and state.ahead.entered_s is not None:
        times.append(state.ahead.entered_s + state.settings.formation_s)
    return min(times, default=None)


def _began_s(state: State, gen: Generation) -> float:
    """Since when everybody is there to form it."""
    if gen.taken_s is not None:
        return gen.taken_s
    entered = (state.workers[key] for key in gen.members if state.workers[key].generation >= gen.number)
    return max((w.entered_s for w in entered if w.holds_state), default=gen.announced_s)


def _was_waited_for(state: State, gen: Generation) -> bool:
    """Some gave up while others were busy elsewhere: what they missed then says nothing of who can be reached."""
    if gen.broken_s is None or gen.taken_s is not None or gen.attempt >= lists.FAIR_TRIES:
        return False
    return _began_s(state, gen) > gen.broken_s + state.settings.grace_s


def _form_again(turn: Turn, gen: Generation) -> None:
    overdue = gen.broken_s is None
    ahead = turn.state.ahead
    if overdue and ahead is not None:
        if all(key in ahead.leavers or turn.state.workers[key].generation >= ahead.number for key in gen.members):
            evict_culprits(turn, ahead, frozenset(gen.members))
    elif not _was_waited_for(turn.state, gen) and (gen.attempt > 0 or (overdue and turn.state.newest is gen)):
        evict_culprits(turn, gen, frozenset())
    _regroup(turn, gen, "not formed in time" if overdue else "broken", gen.attempt + 1)


def _regroup(turn: Turn, gen: Generation, why: str, attempt: int) -> None:
    """An unplanned generation of everybody who is there; without one that is sound, wait or start anew."""
    members = lists.survivors(turn.state, gen, turn.now_s)
    if members is not None:
        _give_up_lost(turn, gen, why)
        announce(turn, members, planned=False, attempt=attempt, why=why)
    elif lists.nobody_left(turn.state, turn.now_s):
        _start(turn, f"{why}; nobody who held state is left", attempt)


def _give_up_lost(turn: Turn, gen: Generation, why: str) -> None:
    for key in gen.members:
        if _missing(turn, key):
            evict(turn, key, f"generation {turn.state.number + 1} goes on without it: {why}")


def _start(turn: Turn, why: str, attempt: int) -> None:
    """A generation of newcomers only; its leader restores the checkpoint if there is one."""
    state, gen = turn.state, turn.state.active
    chosen = lists.beginners(state, gen, turn.now_s)
    if chosen is None:
        return
    if gen is not None:
        _give_up_lost(turn, gen, why)
    if state.loops_done:
        # The state that is restored may be of an earlier loop: its members say of which.
        end_loops(turn, 0, 0)
    announce(turn, chosen, planned=False, attempt=attempt, why=why)
