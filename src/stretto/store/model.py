"""The values that go into the store and come out of it. Database rows never leave the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from stretto.jobs.events import Event
from stretto.jobs.model import Job, Level, Phase

Role: TypeAlias = Literal["viewer", "user", "admin"]
Item = TypeVar("Item")


class Entry(msgspec.Struct, frozen=True):
    """One event to be written, and the job as it is after it."""

    at_s: float
    event: Event
    job: Job | None
    """None: the event is not about a job."""


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has not ended, and whose row cannot be read."""

    job: Job
    why: str
    whole: bool
    """It is what its events say; otherwise only a stand-in."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a starting server needs."""

    jobs: list[Job]
    """All that have not ended and can be read, by number."""
    damaged: list[Damaged] = []
    """The others."""
    settings: dict[str, Any]
    learned: dict[str, bytes]
    next_number: int
    """Larger than any number that was ever used, also by jobs that retention has removed."""
    last_seq: int


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs, and which page of them. Conditions that are left out hold for every job."""

    phases: tuple[Phase, ...] = ()
    name: str | None = None
    """Exactly this, or a pattern: `*` is any text, `?` any one character."""
    user: str | None = None
    queue: str | None = None
    level: Level | None = None
    labels: Mapping[str, str] = {}
    """All of them."""
    oldest_first: bool = False
    after: int | None = None
    """The `next` of the page before."""
    limit: int = 100


class Page(msgspec.Struct, Generic[Item], frozen=True):
    """A part of a list. Jobs that come in while somebody turns pages shift nothing: pages end at a job's number."""

    items: list[Item]
    next: int | None
    """`after` of the next page; None: this was the last."""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody's right to use the API. The secret itself is not kept, only its SHA-256 in hexadecimal."""

    id: str
    user: str
    role: Role
    hash: str
    created_s: float
    expires_s: float | None = None
    last_used_s: float | None = None
    """Not more exact than a minute."""
    account: str | None = None
    """Whose processes its jobs are, with the account's number; None: it was made where nobody tells them apart."""
    uid: int | None = None

    def expired(self, now_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= now_s
