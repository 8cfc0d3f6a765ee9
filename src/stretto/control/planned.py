"""Another membership is wanted than there is: propose it, while the members train on."""

from __future__ import annotations

from stretto.control import lists
from stretto.control.announcing import announce
from stretto.control.departures import evict_culprits
from stretto.control.roster import Generation, State
from stretto.control.turn import Turn

_PATIENCE = 3
"""A proposal that the members passed by for so many formation times is made again."""


def propose(turn: Turn) -> None:
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
        announce(turn, members, planned=True, attempt=attempt, why=lists.reason(state, newest, members))


def times_s(state: State) -> list[float]:
    """When patience with a proposal ends."""
    newest, settings = state.newest, state.settings
    if newest is None or newest is state.active:
        return []
    waits = [newest.announced_s + times * settings.formation_s for times in (1, _PATIENCE)]
    return waits if newest.broken_s is None else [*waits, newest.broken_s + settings.grace_s]


def _passed_by(turn: Turn, gen: Generation, newest: Generation) -> bool:
    """The members have gone on for long without taking the proposal: somebody could not prepare for it."""
    applied = min(turn.state.workers[key].applied for key in gen.members)
    long = turn.now_s >= newest.announced_s + _PATIENCE * turn.state.settings.formation_s
    return long and applied >= newest.start + 2


def _proposal_failed(turn: Turn, gen: Generation, newest: Generation) -> bool:
    """Try once more, then without a newcomer. The members train on meanwhile and are not to blame."""
    settings = turn.state.settings
    if newest.broken_s is None or turn.now_s < newest.broken_s + settings.grace_s:
        return False
    if newest.attempt == 0:
        return True
    evicted = evict_culprits(turn, newest, frozenset(gen.members))
    return evicted or turn.now_s >= newest.announced_s + settings.formation_s
