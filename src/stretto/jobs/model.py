"""A job as the control plane knows it: what was asked for, and what became of it so far.

Frozen values; times are seconds since 1970 and come from outside. A `Job` is what its events make of it
(`lifecycle.apply`), nothing else: the store keeps it beside them so that nobody has to read them all. Values have no
cycles, so the collector need not look at them: there are many.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

Phase: TypeAlias = Literal["queued", "running", "suspended", "succeeded", "failed", "cancelled"]
"""`running`: it has workers. `queued`: it has none and wants some."""
Wish: TypeAlias = Literal["run", "suspend", "cancel"]
Level: TypeAlias = Literal["elastic", "restart", "rigid", "service"]

ENDED: frozenset[Phase] = frozenset({"succeeded", "failed", "cancelled"})


class Seat(msgspec.Struct, frozen=True, order=True, gc=False):
    """A place for one worker: the node's name, and which of its devices."""

    node: str
    devices: tuple[int, ...] = ()


Cause: TypeAlias = Literal["preempted", "asked", "machine", "node"]
"""Why a job was stopped that would have gone on: for others, by a person's own act, by a fault, with its node."""


class Taken(msgspec.Struct, frozen=True, gc=False):
    """Why workers were taken from a job that would have gone on."""

    cause: Cause
    text: str
    """Who or what did it, in a few words."""
    by: tuple[str, ...] = ()
    """Names of the jobs that they were taken for, where that is known."""
    told: bool = False
    """What that costs was told when they were asked to leave."""


class Worker(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A process that was launched and has not been seen to end."""

    name: str
    launch: str
    seat: Seat
    launched_s: float
    member: int = 0
    """Its place in a group that is started together, or a replica's port."""
    port: int = 0
    """Where the group meets."""
    pid: int = 0
    """Once it has one."""
    began_s: float = 0.0
    """When it got it."""
    leaving: str = ""
    """Why it was asked to end; empty while it was not."""
    preempted: bool = False
    """It was asked to for others, although its job would go on."""
    taken: Taken | None = None
    """By whom or what, where its job would go on."""


class Account(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of the machine, by name and number: both must belong together when anything is started as it."""

    name: str
    uid: int


class Context(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the submitter's surroundings contribute."""

    cwd: str
    """Absolute, or `~`: what a relative `workdir` is relative to."""
    env: dict[str, str] = {}
    """Variables taken over from where it was submitted; those of the job file come on top."""


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    number: int
    """Ascending in order of submission; its id."""
    name: str
    user: str
    submitted_s: float
    spec: dict[str, Any]
    """The job file, as it was accepted."""
    context: Context
    level: Level
    account: Account | None = None
    """Whose processes its workers are, where the server can tell accounts apart; None: the server's own."""
    width_milli: int = 1000
    """Milli-GPU per worker."""
    min_workers: int = 1
    """As asked for, or as scaled later."""
    max_workers: int = 1
    secret: str = ""
    """What its workers prove themselves with."""

    phase: Phase = "queued"
    wish: Wish = "run"
    message: str = ""
    """The last thing that a person should know: why it failed, why it is tried again."""
    exit_code: int | None = None
    workers: tuple[Worker, ...] = ()
    helpers: tuple[Worker, ...] = ()
    """Processes that it needs beside its workers (a service's proxy): they hold no devices and are counted nowhere."""
    node: str = ""
    """Where it was asked to move to; empty: anywhere."""
    act: str = ""
    """What a person has asked for since it was started that may stop it, and who: `migrated by ana`."""
    launches: int = 0
    """So many workers were ever launched."""
    finished: int = 0
    """Workers of those started together that have ended well by themselves, while others still run."""
    failures: int = 0
    """Machine faults since it last made progress."""
    not_before_s: float = 0.0
    """Not started again before."""
    started_s: float | None = None
    ended_s: float | None = None
    changed_s: float = 0.0
    """When the number of its workers changed last; at first, its submission."""
    ran_s: float = 0.0
    """Time with workers, waiting time and device-seconds, up to `changed_s`."""
    waited_s: float = 0.0
    device_s: float = 0.0
    starts: int = 0
    """From no worker to some."""
    resizes: int = 0
    """From some workers to another number of them."""
    preemptions: int = 0
    """From some to none though it wished to run."""
    migrations: int = 0
    keeps: bool = False
    """It was seen to keep its progress when it is stopped."""
    start_s: float = 0.0
    """From launch to taking part, as it was measured; 0: it was not."""
    lost_s: float = 0.0
    """Seconds of work that it lost to others, to people's acts and to faults."""
    lost: dict[str, float] = {}
    """The same by what happened, the latest last."""
    steps: int = 0
    """Committed, as last recorded."""
    total_steps: int | None = None
    metrics: dict[str, float] = {}
    paused_s: float = 0.0
    """Time without a step because of resizes and losses, as the worker that was there longest saw it."""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def id(self) -> str:
        return str(self.number)

    def worker(self, name: str) -> Worker | None:
        """A worker or a helper."""
        return next((worker for worker in (*self.workers, *self.helpers) if worker.name == name), None)
