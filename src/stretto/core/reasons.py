"""Why a job has the workers it has. Decisions carry codes and numbers; sentences are made on demand.

Each reason has a code, a short name (stable, used by the API and metrics) and a template into which the decision's
numbers are put, and the names of the jobs that it is about (decisions have their numbers).
"""

from __future__ import annotations

import math
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
    HAS_RESERVATION = 36
    NOT_TRIED = 37
    MEASURES = 38
    NO_USE_FOR_MORE = 39
    JUST_STARTED = 40


_TEXT: dict[Reason, str] = {
    Reason.NONE: "no reason was given",
    Reason.RUNS: "runs: it needs {0:GPU} and {1:was} free at its turn",
    Reason.GROWN: "grown: one more worker of it was the best use of a free GPU",
    Reason.SHRUNK: "shrunk to {0:worker}: others gain more from the rest",
    Reason.AT_MAXIMUM: "runs on {0:worker}, the most that it may have",
    Reason.NO_ROOM: "waits: it needs {0:GPU}, {1:was} left at its turn",
    Reason.BEHIND_HEAD: "waits in order: the job at the head of the queue needs {0:GPU}, {1:is} free",
    Reason.PREEMPTED: "stopped: jobs ahead of it left {1:GPU}, it needs {0:g}",
    Reason.LOWER_QUEUE: "waits in queue {0:g}: jobs with less attained service go first ({1:GPU} left)",
    Reason.WAITS_FOR_ROUND: "stays as it is until the next round, {0:in}",
    Reason.WAITS_FOR_TURN: "waits for its turn: {0:job} before it in the cycle",
    Reason.BACKFILLED: "runs ahead of its turn: it ends before the reservation {0:in} or fits beside it",
    Reason.RESERVED: "waits with a reservation for {0:GPU} {1:in}",
    Reason.WOULD_DELAY: "waits: starting now would delay the reservation {0:in}",
    Reason.REJECTED_DEADLINE: "rejected: its deadline {0:in} cannot be met with what is already promised",
    Reason.ADMITTED_SHARE: "admitted: its deadline needs a share of {0:GPU} now",
    Reason.LITTLE_GAIN: "keeps its size: one more worker of it was not the best use of a GPU",
    Reason.NOT_WORTH_RESIZE: "stays as it is: a resize would gain {0:s} and cost {1:s}",
    Reason.FAIR_SHARE: "runs on its fair share of {0:GPU}",
    Reason.BEHIND_FAIR_SHARE: "goes first: it would take {0:.2f} times as long as on a fair share (limit: {1:.2f})",
    Reason.YIELDS_TO_SERVICE: "gives way to services, which need {0:GPU}",
    Reason.SERVICE_LOAD: "serves: the load asks for {0:replica}",
    Reason.TOO_LARGE: "can never run here: it needs {0:GPU}, the cluster has {1:g}",
    Reason.FRAGMENTED: "waits with {1:GPU} free: no nodes have room for {0:worker}",
    Reason.CHOSEN_BY_SOLVER: "the optimiser gave it {0:worker}",
    Reason.NODE_LOST: "a node it ran on was lost: it has {0:worker} left",
    Reason.NEARLY_DONE: "stays as it is: it ends {0:in}",
    Reason.CUT_TO_ROOM: "runs on {0:worker}: there was no place for the {1:g} that were decided",
    Reason.CUT_TO_STEP: "runs on {0:worker}: {1:was} decided, which is not one of its sizes",
    Reason.KEEPS_PROGRESS: "goes on as it is: stopping it would lose {0:s} of work",
    Reason.KEEPS_MINIMUM: "runs on its minimum of {0:worker}: it is not preemptible",
    Reason.WAITS_FOR_PINNED: "waits: it needs {0:GPU}, and {1:is} held by jobs that would lose their work{jobs}",
    Reason.PREEMPTED_URGENT: "stopped for a more urgent job{jobs}: {0:s} of its work are lost",
    Reason.RESERVED_FOR: "waits: {who} has a reservation for {0:GPU} and comes first, expected to start {1:in}",
    Reason.HAS_RESERVATION: "has a reservation for {0:GPU}: expected to start {1:in}{when}",
    Reason.EXPLORES: "tries {0:worker}: of the sizes measured so far {1:g} is the best",
    Reason.MEASURES: "runs on {0:worker} while its speed there is measured",
    Reason.NOT_TRIED: "runs on {0:worker}: larger sizes of it were not tried",
    Reason.NO_USE_FOR_MORE: "runs on {0:worker}: more are not expected to make it faster",
    Reason.JUST_STARTED: "goes on for a moment: it was started {0:s} ago",
    Reason.SCARCE: "waits: other jobs have what else it asks for",
}


class _Figure(float):
    """A number that is written with what it counts: `{0:worker}` is `1 worker` or `2 workers`."""

    def __format__(self, spec: str) -> str:
        match spec:
            case "s":
                return _span(float(self))
            case "in":
                return f"in about {_Figure(max(self, 0.0)):s}" if math.isfinite(self) else "at a time that nobody knows"
            case "is" | "was":
                return f"{float(self):g} {spec if float(self) == 1 else {'is': 'are', 'was': 'were'}[spec]}"
            case word if word.isalpha() and word != "g":
                return f"{float(self):g} {word}{'' if float(self) == 1 else 's'}"
        return format(float(self), spec)


def _span(seconds: float) -> str:
    """`0.4 s`, `90 s`, `3 min`, `56 h`."""
    for unit, length_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s".replace(".0 s", " s")


def name(code: int) -> str:
    """The stable name of a code, for machines: `no-room`."""
    return Reason(code).name.lower().replace("_", "-")


def explain(code: int, first: float = 0.0, second: float = 0.0, jobs: Sequence[str] = (), more: int = 0) -> str:
    """The sentence that `stretto why` prints. `jobs` are the names of those that it is about, `more` how many others
    it is about."""
    names = ", ".join(jobs) + (f" and {more} more" if more > 0 else "")
    return _TEXT[Reason(code)].format(
        _Figure(first),
        _Figure(second),
        jobs=f" ({names})" if jobs else "",
        who=names or "another job",
        when=f", when {names} ends" if jobs else "",
    )


def fragmented(decided: int, got: int, free_gpus: float) -> tuple[Reason, float, float]:
    """The reason and its numbers for a job that got fewer workers than decided, because the room is in pieces."""
    return (Reason.CUT_TO_ROOM, got, decided) if got else (Reason.FRAGMENTED, decided, free_gpus)
