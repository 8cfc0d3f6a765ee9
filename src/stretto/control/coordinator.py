"""The coordinator of one job: who is in, as a pure state machine.

`handle(state, event, now_s)` gives the next state and the effects, to be carried out in their order: what is
journalled must be on disk before what follows it is sent. Time is an input; `wake_s` says when a `Tick` is due.

After every event the same questions are asked of the state, so that no order of events is special:

1. Whose process has ended, or whose lease?
2. Is everybody at the end of a loop, or has somebody left it alone? Has everybody finished? Does a member hang?
3. Does the active generation miss somebody, is it broken, or not formed in time? Or the proposal that its members
   have gone into? Then an *unplanned* generation of those who are there, at once. If nobody who is there holds state:
   wait, and only when all that might hold it are confirmed to have ended, begin anew with newcomers (who restore the
   checkpoint).
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

import math

from stretto.control import departures, endings, leavers, planned, reports, stuck, unplanned
from stretto.control.events import Closed, Effect, Event, Exited, Received, Slept, Tick, Want
from stretto.control.roster import Settings, State
from stretto.control.turn import Turn


def begin(settings: Settings) -> State:
    """The state of a job that nobody has joined yet."""
    return State(settings=settings, want=settings.want)


def handle(state: State, event: Event, now_s: float) -> tuple[State, tuple[Effect, ...]]:
    """What follows from an event."""
    turn = Turn(state, now_s)
    match event:
        case Received(connection, message):
            reports.received(turn, connection, message)
        case Closed(connection):
            departures.closed(turn, connection)
        case Exited(name, incarnation, status):
            departures.exited(turn, name, incarnation, status)
        case Want():
            leavers.wanted(turn, event)
        case Slept(seconds):
            # What was said meanwhile is still to be read: nobody is late before another heartbeat.
            turn.state = state.later(seconds + state.settings.heartbeat_s)
        case Tick():
            pass
    _settle(turn)
    return turn.state, tuple(turn.effects)


def wake_s(state: State, now_s: float) -> float:
    """When a `Tick` is due though nothing happens: always later than now, and infinite if never."""
    if state.over:
        return math.inf
    modules = (departures, endings, unplanned, planned)
    return min((t for module in modules for t in module.times_s(state) if t > now_s), default=math.inf)


def _settle(turn: Turn) -> None:
    """The five questions."""
    if turn.state.over:
        return
    departures.confirm_ends(turn)
    endings.judge_silence(turn)
    endings.judge_loop(turn)
    endings.judge_loops(turn)
    endings.judge_end(turn)
    stuck.judge(turn)
    if turn.state.over:
        return
    if not unplanned.repair(turn):
        planned.propose(turn)
    leavers.release(turn)
