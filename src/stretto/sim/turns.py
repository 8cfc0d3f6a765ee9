"""What both runners share: the turns of a run, how far it is, and when it will never end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from stretto.core.policy import fail
from stretto.errors import PolicyError

Progress: TypeAlias = Callable[[int, int], None]
"""Called now and then with jobs ended and jobs in all."""

REPORT_EVERY = 512
"""Turns between two calls of it."""

IDLE_TURNS = 100_000
"""A policy that was asked this often while nothing else happened will ask to be woken for ever."""


def stuck(policy: str, job: str) -> PolicyError:
    """The error for a run that will never end."""
    return fail(policy, f"leaves job {job!r} waiting for ever: nothing runs and nothing will happen")
