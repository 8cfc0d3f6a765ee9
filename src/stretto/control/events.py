"""What happens to a coordinator, and what it wants done: values that go in and come out of `coordinator.handle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from stretto.control.journal import Record
from stretto.runtime import messages as m

# Events.


@dataclass(frozen=True)
class Received:
    """A message on a connection; the first one must be a hello."""

    connection: int
    message: m.Message


@dataclass(frozen=True)
class Closed:
    connection: int


@dataclass(frozen=True)
class Exited:
    """The backend confirms that the process is gone."""

    worker: str
    incarnation: str = ""
    """Which process of that name; the latest if not said."""
    status: int | None = None
    """With which it has ended by itself."""


@dataclass(frozen=True)
class Want:
    """So many workers, and (or only) who should leave. Without names the latest that came leave."""

    size: int | None = None
    leavers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Slept:
    """The coordinator itself did not run for so long: what it has not heard meanwhile says nothing."""

    seconds: float


Event: TypeAlias = Received | Closed | Exited | Want | Tick | Slept

# Effects.


@dataclass(frozen=True)
class Journal:
    """Must be on disk before the effects after it are carried out."""

    record: Record


@dataclass(frozen=True)
class Send:
    connection: int
    worker: str
    message: m.Message


@dataclass(frozen=True)
class Refuse:
    """The connection is not a worker's of this job: tell it why and close it."""

    connection: int
    text: str


@dataclass(frozen=True)
class Drop:
    """Close a connection that its worker has replaced by another."""

    connection: int


@dataclass(frozen=True)
class Announced:
    """A generation was made, and why."""

    number: int
    members: tuple[str, ...]
    leavers: tuple[str, ...]
    planned: bool
    why: str


@dataclass(frozen=True)
class Formed:
    """Everybody of a generation is in it."""

    number: int
    members: tuple[str, ...]
    applied: int


@dataclass(frozen=True)
class Evicted:
    """A worker is out; for a newcomer that does not fit, the text says what differs."""

    worker: str
    reason: str


@dataclass(frozen=True)
class Progress:
    """A heartbeat, and the steps that all members are known to have applied."""

    worker: str
    heartbeat: m.Heartbeat
    committed: int


@dataclass(frozen=True)
class Done:
    """All members have finished."""


@dataclass(frozen=True)
class Failed:
    reason: str


Effect: TypeAlias = Journal | Send | Refuse | Drop | Announced | Formed | Evicted | Progress | Done | Failed
