"""Who makes no steps any more, and when that ends the job.

A worker says of itself that it stands still and whether it waits for others. Those who do not wait are to blame; if all
members wait, they wait for each other, and all are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.control.endings import fail
from stretto.control.roster import State, Worker
from stretto.control.turn import Turn
from stretto.runtime.messages import Stuck
from stretto.runtime.watchdog import ENDED

_FRAMES, _LONGEST = 8, 250
_PLACES = {"first": "in its first pass through the loop's body", "after": "outside of its loops"}


def bounded(told: Sequence[Stuck]) -> Stuck | None:
    """What a worker says of itself, as much of it as is kept."""
    if not told:
        return None
    frames = tuple(frame[-_LONGEST:] for frame in told[0].stack[-_FRAMES:])
    return replace(told[0], line=told[0].line[-_LONGEST:], stack=frames)


def to_name(state: State) -> tuple[Worker, ...]:
    """The workers that hold the job up at this moment, those that have stood for the longest first."""
    there = [w for w in state.workers.values() if not (w.gone or w.exited or w.released)]
    to_blame = [w for w in there if w.stuck is not None and not w.stuck.waits] or _deadlocked(state)
    return tuple(sorted(to_blame, key=_order))


def judge(turn: Turn) -> None:
    """Has a member stood in its loop for so long that the job must end?"""
    gen = turn.state.active
    if gen is None:
        return
    whole = gen.complete and gen.broken_s is None
    judged = gen.members if whole else turn.state.absent(gen)
    late = [
        w
        for w in to_name(turn.state)
        if w.incarnation in judged
        and w.stuck is not None
        and w.stuck.overdue
        and turn.state.reachable(w.incarnation, turn.now_s)
    ]
    if late:
        fail(turn, _reason(late[0], len(_deadlocked(turn.state))))


def describe(worker: Worker) -> str:
    """`w1 has made no step for 75 s, in the loop's body at train.py:41 train_step`."""
    stuck = worker.stuck
    assert stuck is not None
    at = f" at {stuck.line}" if stuck.line else ""
    return f"{worker.name} has made no step for {stuck.seconds:.0f} s, {_place(stuck)}{at}"


def _deadlocked(state: State) -> list[Worker]:
    """The members of the job, if all of them stand in a loop and wait for each other."""
    gen = state.active
    members = [state.workers[key] for key in gen.members] if gen is not None and gen.complete else []
    if all(w.stuck is not None and w.stuck.waits and w.stuck.place != "after" and not w.gone for w in members):
        return members
    return []


def _order(worker: Worker) -> tuple[float, int]:
    return -(worker.stuck.seconds if worker.stuck is not None else 0.0), worker.order


def _place(stuck: Stuck) -> str:
    if stuck.waits:
        return "waiting for the others"
    return _PLACES.get(stuck.place, "in the loop's body")


def _reason(worker: Worker, deadlocked: int) -> str:
    stuck = worker.stuck
    others = f", as all {deadlocked} workers do" if deadlocked > 1 else ""
    within = f" (in {stuck.stack[-1]})" if stuck is not None and stuck.stack and stuck.stack[-1] != stuck.line else ""
    return (
        f"worker {describe(worker)}{within}{others}, and was taken to hang; "
        f"where a script may take longer than that, {ENDED} in the job's `env` says how many seconds (0: for ever)"
    )
