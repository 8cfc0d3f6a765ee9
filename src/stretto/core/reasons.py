"""Why a job has the workers it has. Decisions carry codes and numbers; sentences are made on demand.

Each reason has a code, a short name (stable, used by the API and metrics) and a template into which the decision's
numbers are put, and the names of the jobs that it is about (decisions have their numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Reason(IntEnum):
    """The one short list of reasons. New policies use these; the list grows only when none fits."""

    NONE = 0
    RUNS = 1
    GROWN = 2
    SHRUNK = 3
    AT_MAXIMUM = 4
    NO_ROOM = 5
    BEHIND_HEAD = 6
    PREEMPTED = 7
    LOWER_QUEUE = 8
    WAITS_FOR_ROUND = 9
    WAITS_FOR_TURN = 10
    BACKFILLED = 11
    RESERVED = 12
    WOULD_DELAY = 13
    REJECTED_DEADLINE = 14
    ADMITTED_SHARE = 15
    LITTLE_GAIN = 16
    NOT_WORTH_RESIZE = 17
    FAIR_SHARE = 18
    BEHIND_FAIR_SHARE = 19
    YIELDS_TO_SERVICE = 20
    SERVICE_LOAD = 21
    TOO_LARGE = 22
    FRAGMENTED = 23
    CHOSEN_BY_SOLVER = 24
    NODE_LOST = 25
    NEARLY_DONE = 26
    CUT_TO_ROOM = 27
    CUT_TO_STEP = 28
    KEEPS_PROGRESS = 29
    WAITS_FOR_PINNED = 30
    PREEMPTED_URGENT = 31
    RESERVED_FOR = 32
    SCARCE = 33
    EXPLORES = 34
    KEEPS_MINIMUM = 35
    JUST_STARTED = 36


_TEXT: dict[Reason, str] = {
    Reason.NONE: "no reason was given",
    Reason.RUNS: "runs: it needs {0:g} GPUs and {1:g} were free at its turn",
    Reason.GROWN: "grown: the marginal gain of the last worker ({0:g}) was the best use of a free GPU",
    Reason.SHRUNK: "shrunk to {0:g} workers: others gain more from the rest ({1:g})",
    Reason.AT_MAXIMUM: "runs at its useful maximum of {0:g} workers",
    Reason.NO_ROOM: "waits: it needs {0:g} GPUs, {1:g} were left at its turn",
    Reason.BEHIND_HEAD: "waits in order: the job at the head of the queue needs {0:g} GPUs, {1:g} are free",
    Reason.PREEMPTED: "stopped: jobs ahead of it left {1:g} GPUs, it needs {0:g}",
    Reason.LOWER_QUEUE: "waits in queue {0:g}: jobs with less attained service go first ({1:g} GPUs left)",
    Reason.WAITS_FOR_ROUND: "waits for the next round, in {0:g} s",
    Reason.WAITS_FOR_TURN: "waits for its turn: {0:g} jobs are before it in the cycle",
    Reason.BACKFILLED: "runs ahead of its turn: it ends before the reservation at {0:g} s or fits beside it",
    Reason.RESERVED: "waits with a reservation for {0:g} GPUs at {1:g} s",
    Reason.WOULD_DELAY: "waits: starting now would delay the reservation at {0:g} s",
    Reason.REJECTED_DEADLINE: "rejected: its deadline at {0:g} s cannot be met with what is already promised",
    Reason.ADMITTED_SHARE: "admitted: its deadline needs a share of {0:g} GPUs now",
    Reason.LITTLE_GAIN: "stays as it is: another worker would gain it {0:g}, the limit is {1:g}",
    Reason.NOT_WORTH_RESIZE: "stays as it is: a resize would gain {0:g} s and cost {1:g} s",
    Reason.FAIR_SHARE: "runs on its fair share of {0:g} GPUs",
    Reason.BEHIND_FAIR_SHARE: "goes first: its slowdown against a fair share would reach {0:g}, the limit is {1:g}",
    Reason.YIELDS_TO_SERVICE: "gives way to services, which need {0:g} GPUs",
    Reason.SERVICE_LOAD: "serves: the load asks for {0:g} replicas",
    Reason.TOO_LARGE: "can never run here: it needs {0:g} GPUs, the cluster has {1:g}",
    Reason.FRAGMENTED: "waits: {1:g} GPUs are free but no nodes have room for {0:g} workers",
    Reason.CHOSEN_BY_SOLVER: "the optimiser gave it {0:g} workers (value {1:g})",
    Reason.NODE_LOST: "a node it ran on was lost: {0:g} of its workers are left",
    Reason.NEARLY_DONE: "stays as it is: it ends in {0:g} s",
    Reason.CUT_TO_ROOM: "runs on {0:g} workers: there was no place for the {1:g} that were decided",
    Reason.CUT_TO_STEP: "runs on {0:g} workers: {1:g} were decided, which is not one of its sizes",
    Reason.KEEPS_PROGRESS: "goes on as it is: stopping it would lose {0:.0f} s of work",
    Reason.KEEPS_MINIMUM: "runs on its minimum of {0:g} workers: it is not preemptible",
    Reason.WAITS_FOR_PINNED: "waits: it needs {0:g} GPUs, and {1:g} are held by jobs that would lose their work{jobs}",
    Reason.PREEMPTED_URGENT: "stopped for a more urgent job{jobs}: {0:.0f} s of its work are lost",
    Reason.RESERVED_FOR: "waits: {0:g} GPUs are kept for a job that has waited longer{jobs}, free in about {1:.0f} s",
    Reason.EXPLORES: "tries {0:g} workers with what is free: so far {1:g} are known to be of use",
    Reason.JUST_STARTED: "goes on for a moment: it was started {0:.1f} s ago",
    Reason.SCARCE: "waits: other jobs have what else it asks for",
}


def name(code: int) -> str:
    """The stable name of a code, for machines: `no-room`."""
    return Reason(code).name.lower().replace("_", "-")


def explain(code: int, first: float = 0.0, second: float = 0.0, jobs: Sequence[str] = ()) -> str:
    """The sentence that `stretto why` prints. `jobs` are the names of those that it is about."""
    named = f" ({', '.join(jobs)})" if jobs else ""
    return _TEXT[Reason(code)].format(first, second, jobs=named)


def fragmented(decided: int, got: int, free_gpus: float) -> tuple[Reason, float, float]:
    """The reason and its numbers for a job that got fewer workers than decided, because the room is in pieces."""
    return (Reason.CUT_TO_ROOM, got, decided) if got else (Reason.FRAGMENTED, decided, free_gpus)
