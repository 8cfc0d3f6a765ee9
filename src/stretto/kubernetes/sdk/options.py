"""The keyword arguments that several methods of both clients take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from stretto.client import options


class Filters(options.Filters, total=False):
    namespace: str | None
    """`*`: all of them. A job's user is its namespace."""


class Making(TypedDict, total=False):
    """How an ElasticJob is made of a job file. Nothing else is taken along from here."""

    name: str | None
    """Of the object, where it should not be the file's; without either one is made up."""
    image: str | None
    """Where the file names none."""
    namespace: str | None
    env: Mapping[str, str] | None
    """Where the file does not set the same variable."""
    template: Mapping[str, Any] | None
    """A pod template to build on."""
    suspend: bool


class Submission(Making, total=False):
    key: str | None
    """Two submissions with the same one are one job."""
