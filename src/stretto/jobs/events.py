"""Everything that can happen to a job, or to the server. Each is one row of the store, and never changes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from stretto.jobs.model import Cause, Job, Phase, Seat, Taken, Wish


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all."""


class Submitted(_Event, frozen=True, kw_only=True):
    """The job as it was accepted; its first event."""

    job: Job
    key: str = ""
    """The idempotency key it came with."""
    digest: str = ""
    """Of what came with the key: the same key with other contents is an error."""


class Wished(_Event, frozen=True, kw_only=True):
    """Somebody wants it to run, to be suspended or to be cancelled."""

    wish: Wish
    by: str
    why: str = ""


class Scaled(_Event, frozen=True, kw_only=True):
    min_workers: int
    max_workers: int
    by: str


class Moved(_Event, frozen=True, kw_only=True):
    """Somebody wants it on that node; `node` empty: anywhere again."""

    node: str
    by: str
    why: str = ""


class Launched(_Event, frozen=True, kw_only=True):
    """A worker will be started; written before it is."""

    worker: str
    launch: str
    seat: Seat
    member: int = 0
    helper: bool = False
    """It is no worker, but something that the workers need."""
    port: int = 0
    """Where the members of a group that is started together meet."""
    again: bool = False
    """It was launched before, and nothing was started: the server had died. It is still the same worker."""


class Running(_Event, frozen=True, kw_only=True):
    """A launched worker has a process."""

    worker: str
    launch: str
    pid: int
    how: str = ""
    why: str = ""
    began_s: float = 0.0
    """Since when, if it was found by a later server than its own; 0: now."""


class Leaving(_Event, frozen=True, kw_only=True):
    """A worker was asked to end: the job shrinks, moves, is preempted, suspended or cancelled, or has failed."""

    worker: str
    why: str
    preempted: bool = False
    """Others need its place; its job would go on."""
    taken: Taken | None = None
    """By whom or what, where its job would go on."""


class Exited(_Event, frozen=True, kw_only=True):
    """A worker's processes are gone."""

    worker: str
    launch: str
    how: Literal["exited", "signalled", "lost", "refused"]
    status: int = 0
    text: str = ""


class Resized(_Event, frozen=True, kw_only=True):
    """The loop decided on another size, and why. It is carried out by what follows."""

    workers: int
    before: int
    reason: str
    """The stable name of the reason."""
    text: str


class Retried(_Event, frozen=True, kw_only=True):
    """The machine failed it; it is tried again, not before this time."""

    not_before_s: float
    text: str
    afresh: bool = False
    """It had run well before: earlier faults do not count."""


class Kept(_Event, frozen=True, kw_only=True):
    """It was seen that a stop costs it no work, or (`keeps` false) that it does after all."""

    how: str
    keeps: bool = True
    start_s: float = 0.0
    """From its launch until it took part, where that was seen."""


class Interrupted(_Event, frozen=True, kw_only=True):
    """It wanted to run, and was stopped: for others, by a fault of the machine, or with its node. Or a person has
    stopped it (`asked`), and it lost work by that."""

    cause: Cause
    lost_s: float
    """Seconds of its work that are gone."""
    text: str
    """What happened, in a few words."""
    by: tuple[str, ...] = ()
    """Names of the jobs that it was stopped for, where that is known."""


class Progressed(_Event, frozen=True, kw_only=True):
    """Recorded now and then, not at every step."""

    steps: int
    total_steps: int | None = None
    metrics: dict[str, float] = {}
    paused_s: float = 0.0


class Stuck(_Event, frozen=True, kw_only=True):
    """A worker makes no steps, or (`moves`) makes them again."""

    worker: str
    text: str
    """What it does instead, or after how long it goes on."""
    stack: tuple[str, ...] = ()
    """The innermost frames of its script's thread, the innermost last."""
    moves: bool = False


class Warned(_Event, frozen=True, kw_only=True):
    """What its owner should know before it becomes the job's end."""

    text: str


class Migrated(_Event, frozen=True, kw_only=True):
    """A move was completed; what it cost the job, in seconds without a step."""

    node: str
    paused_s: float = 0.0


class Ended(_Event, frozen=True, kw_only=True):
    """Its last event."""

    phase: Phase
    message: str = ""
    exit_code: int | None = None


class Noted(_Event, frozen=True, kw_only=True):
    """Something that changes no job: the server started, the policy was changed, a node was cordoned."""

    what: str
    by: str = ""
    data: dict[str, Any] = {}


Event: TypeAlias = (
    Submitted | Wished | Scaled | Moved | Launched | Running | Leaving | Exited | Resized | Retried | Kept
    | Interrupted | Progressed | Stuck | Warned | Migrated | Ended | Noted
)  # fmt: skip


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its place in history."""

    seq: int
    at_s: float
    job: int | None
    event: Event
