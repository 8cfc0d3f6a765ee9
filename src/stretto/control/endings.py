"""The end of a loop, which all reach at the same step; and of the job, well or not."""

from __future__ import annotations

from stretto.control import formation
from stretto.control.departures import WITHOUT_A_WORD
from stretto.control.events import Done, Failed
from stretto.control.roster import Generation, State, Worker
from stretto.control.turn import Turn
from stretto.runtime import messages as m


def judge_loop(turn: Turn) -> None:
    """Is everybody at the end of the loop, or has somebody left it alone?"""
    state, gen = turn.state, turn.state.active
    if gen is None or not gen.complete:
        return
    ended = _at_end(state, gen)
    going = [w for key in gen.members if (w := state.workers[key]) not in ended and not w.finished]
    places = {w.at_end.applied for w in ended if w.at_end is not None}
    if ended and not going and len(places) == 1:
        _end_loop(turn, gen, places.pop())
    elif (ended and not going) or _left_alone(turn, gen, going):
        fail(turn, _disagreement(ended, going))


def _at_end(state: State, gen: Generation) -> list[Worker]:
    """Members that wait at the end of the loop under way."""
    members = [state.workers[key] for key in gen.members]
    return [
        w
        for w in members
        if w.at_end is not None and w.at_end.generation == gen.number and w.at_end.loop == state.loops_done
    ]


def _breakers(state: State, gen: Generation) -> list[Worker]:
    return [w for w in _at_end(state, gen) if w.at_end is not None and w.at_end.how == "break"]


def _end_loop(turn: Turn, gen: Generation, applied: int) -> None:
    loop = turn.state.loops_done
    formation.end_loops(turn, loop + 1, applied)
    formation.committed(turn, gen.number)
    for key in gen.members:
        turn.update(key, at_end=None)
        turn.send(key, m.End(loop=loop))


def _left_alone(turn: Turn, gen: Generation, going: list[Worker]) -> bool:
    """Somebody has broken out of the loop, and others are beyond that step, or wait for it in a sum that it will never
    join. Who is still in its body may break out of it, too."""
    steps = [w.at_end.step for w in _breakers(turn.state, gen) if w.at_end is not None and w.at_end.step >= 0]
    if any(w.loop == turn.state.loops_done and steps and w.step > min(steps) for w in going):
        return True
    long = any(turn.now_s >= at_s for at_s in times_s(turn.state))
    return long and all(turn.state.reachable(w.incarnation, turn.now_s) for w in going)


def _disagreement(ended: list[Worker], going: list[Worker]) -> str:
    told = [f"{w.name} left it ({w.at_end.how}) after step {w.at_end.applied}" for w in ended if w.at_end is not None]
    told += [f"{w.name} goes on after step {w.applied}" for w in going]
    return (
        f"not all workers left the loop at the same step: {', '.join(told)}; "
        "call job.stop() to end a loop early: it ends it for all at the same step"
    )


def judge_end(turn: Turn) -> None:
    """Has everybody finished?"""
    state, gen = turn.state, turn.state.active
    if state.failed or gen is None:
        return
    # Who holds nothing yet has come too late.
    members = [w for key in gen.members if (w := state.workers[key]).holds_state or gen.taken_s is not None]
    if any(w.finished for w in members) and all(w.ended for w in members):
        turn.change(done=True)
        turn.journal({"kind": "done"})
        _tell_who_is_left(turn, m.Release())
        turn.effects.append(Done())


def judge_silence(turn: Turn) -> None:
    """A member has ended well and said nothing, by `os._exit(0)`: whoever comes instead would do the same."""
    for worker in turn.state.workers.values():
        if worker.content and worker.member_of and worker.out == WITHOUT_A_WORD and not worker.finished:
            fail(
                turn,
                f"worker {worker.name} ended with status 0 and without a word, as by os._exit(): nobody knows whether "
                "its script has come to its end; let it end in its own way",
            )


def fail(turn: Turn, reason: str) -> None:
    """The job has failed: the first reason counts."""
    if turn.state.over:
        return
    turn.change(failed=reason)
    turn.journal({"kind": "failed", "reason": reason})
    _tell_who_is_left(turn, m.Fail(text=reason))
    turn.effects.append(Failed(reason))


def judge_loops(turn: Turn) -> None:
    """Has a script ended while others go on with loops that it did not have?"""
    members = turn.state.workers.values()
    ended = [w for w in members if w.finished and w.loops >= 0]
    if not ended:
        return
    first = min(ended, key=lambda w: w.loops)
    others = [w for w in members if (w.loops if w.finished else _loops(turn.state, w)) > first.loops]
    if others:
        fail(
            turn,
            f"the script of worker {first.name} ended after {first.loops} loops, that of {others[0].name} goes on: "
            "all workers must leave a loop over epochs at the same one, by something that is equal on all of them",
        )


def _loops(state: State, worker: Worker) -> int:
    """How many loops a member has begun."""
    gen = state.active
    inside = gen is not None and worker.incarnation in gen.members and not worker.gone and worker.holds_state
    return worker.loop + 1 if inside and worker.step >= 0 else -1


def _tell_who_is_left(turn: Turn, message: m.Message) -> None:
    for key, worker in turn.state.workers.items():
        if not worker.gone:
            turn.send(key, message)


def times_s(state: State) -> list[float]:
    """When somebody has waited long enough for one who left the loop."""
    gen = state.active
    left_s = min((w.at_end_s for w in _breakers(state, gen)), default=None) if gen else None
    if gen is None or left_s is None:
        return []
    going = [w for key in gen.members if (w := state.workers[key]) not in _at_end(state, gen)]
    return [max(left_s, w.waits_s) + state.settings.formation_s for w in going if w.waits_s is not None]
