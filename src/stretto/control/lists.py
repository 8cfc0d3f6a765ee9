"""Who should be on the next list: pure questions about the state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stretto.control.roster import Generation, State, unique

FAIR_TRIES = 3


def survivors(state: State, gen: Generation, now_s: float) -> list[str] | None:
    """Everybody who is there, leavers too: one of them may be a step ahead. None if no list is sound."""
    newest = state.newest or gen
    there = [key for key in unique((*gen.members, *newest.members)) if state.usable(key, now_s)]
    if state.sound(there):
        return there
    # Leavers that have left but were not released may have to come back, but none while another may hold more.
    concerned = unique(key for g in reversed(state.open) for key in (*g.members, *g.leavers))
    holders = [w for key in concerned if not (w := state.workers[key]).gone and state.holds(key)]
    latest = max((w.member_of for w in holders), default=0)
    leavers = [w.incarnation for w in holders if w.member_of == latest and state.usable(w.incarnation, now_s)]
    return next((both for key in leavers if state.sound(both := [*there, key])), None)


def nobody_left(state: State, now_s: float) -> bool:
    """Nobody ever held state, or all that might are confirmed to have ended."""
    concerned = [state.workers[key] for g in state.open for key in (*g.members, *g.leavers)]
    if not any(g.taken_s is not None for g in state.open) and not any(w.holds_state for w in concerned):
        return True
    return all(w.ended or (state.reachable(w.incarnation, now_s) and not state.holds(w.incarnation)) for w in concerned)


def beginners(state: State, gen: Generation | None, now_s: float) -> list[str] | None:
    """Who begins where nobody holds state; leavers only if the others cannot without them. None if no list is sound."""
    inside = [key for key in gen.members if state.usable(key, now_s)] if gen else []
    stay = [key for key in inside if key not in state.leaving]
    least = state.settings.min_workers if gen is None else min(state.settings.min_workers, state.want)
    for chosen in (stay, inside):
        there = [*chosen, *state.newcomers(now_s)]
        first = there[: max(state.want, least)]
        if len(there) >= least and state.fenced(set(first)):
            return first
    return None


def target(state: State, gen: Generation, newest: Generation, now_s: float) -> list[str]:
    """Who should be in: those that stay in their order, then newcomers, those already proposed first."""
    stay = [key for key in gen.members if key not in state.leaving]
    ready = state.newcomers(now_s)
    ready.sort(key=lambda key: key not in newest.members)
    members = [*stay, *ready[: max(0, state.want - len(stay))]]
    if state.sound(members):
        return members
    # Nobody who stays holds state, or is on a list that may have been taken: one leaver remains for now.
    keepers = sorted((key for key in gen.members if key in state.leaving), key=lambda key: key not in newest.members)
    return next((both for key in keepers if state.sound(both := [key, *members])), [])


def reason(state: State, newest: Generation, members: Iterable[str]) -> str:
    came = [key for key in members if key not in newest.members]
    went = [key for key in newest.members if key not in members]
    told = [f"{'+' if key in came else '-'}{state.workers[key].name}" for key in (*came, *went)]
    return f"{' '.join(told) or 'again'} (want {state.want})"


def culprits(state: State, gen: Generation, protected: frozenset[str]) -> list[str]:
    """Who must go so that the rest can form: as few as break all links reported dead, never the last with state."""
    links = {frozenset((by, to)) for by, named in gen.suspects.items() for to in named if by in gen.members}
    chosen: list[str] = []
    while links := {link for link in links if not link & set(chosen)}:
        votes = {key: sum(key in named for named in gen.suspects.values()) for link in links for key in link}
        ranked = sorted(votes, key=lambda key: (votes[key], gen.members.index(key)))
        able = [key for key in ranked if key not in protected and _spares_state(state, gen, [*chosen, key])]
        if not able:
            return chosen
        chosen.append(able[-1])
    return chosen or _stuck(state, gen, protected)


def _stuck(state: State, gen: Generation, protected: frozenset[str]) -> list[str]:
    """No dead link is known: those that say nothing; in the end who was there most often, the last of them."""
    unformed = [key for key in gen.members if key not in gen.formed and key not in protected]
    silent = [key for key in unformed if key not in gen.suspects]
    if not gen.formed and not gen.suspects:
        silent = silent[-1:]
    elif not silent and gen.attempt >= FAIR_TRIES:
        silent = sorted(unformed, key=lambda key: sum(key in g.members for g in state.open))[-1:]
    chosen: list[str] = []
    for key in reversed(silent):
        if _spares_state(state, gen, [*chosen, key]):
            chosen.append(key)
    return chosen


def _spares_state(state: State, gen: Generation, leaving: Sequence[str]) -> bool:
    left = [key for key in gen.members if key not in leaving and not state.workers[key].gone]
    held = any(state.workers[key].holds_state for key in gen.members)
    return bool(left) and (not held or any(state.workers[key].holds_state for key in left))
