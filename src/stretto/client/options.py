"""The keyword arguments that several methods of all clients take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict


class Filters(TypedDict, total=False):
    """Which jobs: those that fit all that is given."""

    phase: str | Iterable[str]
    """One or several of them; `active` is every phase before the end."""
    name: str | None
    """With `*` and `?`."""
    user: str | None
    queue: str | None
    level: str | None
    labels: Mapping[str, str] | None
    order: str
    """`newest` first, or `oldest`."""
    limit: int | None


class Taken(TypedDict, total=False):
    """What a job takes along from where it is submitted."""

    cwd: str | Path | None
    env: Mapping[str, str] | None
    """Instead of the variables that are taken along otherwise (`surroundings.CAPTURED`)."""


class Submission(Taken, total=False):
    key: str | None
    """Two submissions with the same one are one job."""


class Following(TypedDict, total=False):
    """How a log is followed."""

    worker: str | None
    tail: int | None
    """Begin so many lines before its end."""
    tick_s: float | None
    """An empty piece comes whenever nothing was written for so long."""
    patience_s: float
    """So long is waited for a server that restarts."""
