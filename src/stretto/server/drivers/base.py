"""What the loop asks of whoever drives a job.

A driver knows how the workers of one job find each other and what their ends mean. It launches and ends nothing: it
answers the loop, and calls `changed` when its answers have changed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from stretto.accounts import Identity
from stretto.backends.protocol import Exit
from stretto.jobs.events import Kept, Stuck
from stretto.jobs.model import Job, Phase, Seat, Worker
from stretto.server import asked
from stretto.server.book import Active
from stretto.server.estimates import Estimates

_LOOKS = 2


@dataclass(frozen=True)
class End:
    """The job is over, once its last worker has ended."""

    phase: Phase
    message: str = ""
    exit_code: int | None = None
    polite: bool = False
    """Its workers have all the time to end that its job file gives them."""


@dataclass(frozen=True)
class Fault:
    """The machine failed a worker; the job may be tried again."""

    text: str
    node: str = ""
    """The node that was lost, if it was that."""
    newcomer: bool = False
    """It never took part, and others do: they go on as they are."""


Judgement: TypeAlias = End | Fault | None


@dataclass(frozen=True)
class Surroundings:
    """What drivers need of the server."""

    folder: Path
    """Of all jobs; each has its own below."""
    url: Callable[[], str]
    """Where workers reach us: `ws://host:port`, or `wss://host:port#PIN`."""
    changed: Callable[[int], None]
    """Tells the loop that the answers of a job's driver have changed."""
    progressed: Callable[[int], None]
    """Tells the loop that a job has come further."""
    estimates: Estimates
    pools: Callable[[], tuple[str, ...]]
    clock: Callable[[], float]
    terminate: Callable[[int, str], None]
    """Asks a worker that leaves to end."""
    environment: Mapping[str, str]
    """The server's own."""
    heard: Callable[[float], float] = lambda at_s: at_s
    """What the machine's clock says, and with it the dates of files, as `clock` has it."""
    disturbed: Callable[[int, float, float], bool] = lambda job, since_s, until_s: False
    """Whether neighbours of a job came or went in that time."""
    identity: Callable[[Job], Identity | None] = lambda job: None
    """Whose processes a job's workers are; None: the server's own. Raises `AccountRefused`."""
    looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOOKS))
    """Held while folders are looked through: a file system that hangs must not take all threads."""

    @property
    def records(self) -> Path:
        """What the server believes of its jobs: each has a folder below, which no job can reach where accounts are told
        apart."""
        return records_beside(self.folder)


def records_beside(jobs: Path) -> Path:
    return jobs.parent / "records"


class Driver(ABC):
    def __init__(self, active: Active, surroundings: Surroundings) -> None:
        self.active, self.around = active, surroundings
        self.folder = surroundings.folder / active.job.id
        """Its job's own."""
        self.records = surroundings.records / active.job.id
        """Ours about it."""
        self.longest_pause_s = 0.0
        """The longest time without a step since `watch_pauses` was called."""
        self.newcomers_failed = 0
        """In a row, since one succeeded, whatever the others did meanwhile."""
        self.end: End | None = None
        """How the job ends, once that is known: then nothing is started any more."""
        self.seen: Kept | None = None
        """Whether its progress outlives its processes, as was seen last; the loop writes it down."""
        self.hung: list[Stuck] = []
        """Which workers have begun or ceased to hang; the loop writes it down."""
        self.looking_back: asyncio.Task[None] | None = None
        """Its last worker has ended: finds out whether its progress was saved."""

    @classmethod
    def preparation(cls, active: Active, around: Surroundings) -> Callable[[], Any] | None:
        """What has to be done in a thread before there can be one; it gives the third argument. It may raise."""
        return None

    def watch_pauses(self) -> None:
        """From now on."""
        self.longest_pause_s = 0.0

    def pause_s(self) -> float:
        """The longest since then."""
        return self.longest_pause_s

    def prepare(self, size: int) -> None:
        """So many workers are about to be launched."""
        return

    warm = True
    """Whether its workers may be forks of a warm interpreter."""
    drain_s = 0.0
    """So long a worker that leaves may go on before it is asked to end."""

    @property
    def serving(self) -> bool:
        """Whether it is of use as it is, though some of it fails time and again."""
        return False

    @property
    def recovered(self) -> bool:
        """Whether it has run so well since the last fault that earlier ones do not count any more."""
        return False

    @property
    def helpers(self) -> frozenset[str]:
        """The processes that it needs now beside its workers, by name."""
        return frozenset()

    def helper_command(self, name: str) -> tuple[str, ...]:
        """What one of them executes."""
        raise LookupError(f"{name} is no helper of this job")

    def members(self, count: int) -> Sequence[int]:
        """What tells so many newcomers apart, and is remembered with them."""
        return range(count)

    @property
    def port(self) -> int:
        """Where newcomers that are started together meet; 0: they need no place. It is remembered with them."""
        return 0

    def command(self, member: int, env: Mapping[str, str] | None) -> tuple[str, ...]:
        """What a worker executes."""
        return asked.command(self.active.file, self.folder, env)

    @property
    @abstractmethod
    def joined(self) -> frozenset[str]:
        """Workers that take part."""

    @property
    def ending(self) -> bool:
        """Whether its workers end by themselves."""
        return self.end is not None

    @property
    def failing(self) -> bool:
        """Whether those that still run must be ended, because others have failed."""
        return self.end is not None and self.end.phase == "failed"

    @abstractmethod
    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        """Variables for one worker."""

    def resize(self, size: int, leavers: Sequence[str]) -> Sequence[str]:
        """So many should take part; those named leave. Gives back who must be told by a signal."""
        return leavers

    def stop(self, leavers: Sequence[str]) -> Sequence[str]:
        """All leave. Gives back who must be told by a signal now."""
        return leavers

    @abstractmethod
    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        """A worker has ended, so many are left. Says what that means, as far as it is known by now."""

    def fall_silent(self) -> None:
        """The server is about to end: what closes from now on says nothing of who was at its other end."""
        return

    async def close(self) -> None:
        """Let go, without ending anything."""
        return


def fault_of(worker: Worker, exit: Exit) -> Fault:
    return Fault(describe(worker, exit), worker.seat.node if exit.how == "lost" else "")


def describe(worker: Worker, exit: Exit) -> str:
    """One clause about an end."""
    if exit.how == "exited":
        text = f"{worker.name} ended with exit code {exit.status}"
    elif exit.how == "signalled":
        text = f"{worker.name} was ended by signal {exit.status}"
    elif exit.how == "lost":
        text = f"{worker.name} was lost"
    else:
        text = f"{worker.name} could not be started"
    return f"{text}: {exit.text}" if exit.text else text
