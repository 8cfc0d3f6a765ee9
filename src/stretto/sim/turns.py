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

LOST_TIMES = 1_000
"""A job that has lost its work this often by stops will not end under that policy."""


def stuck(policy: str, job: str) -> PolicyError:
    """The error for a run that will never end."""
    return fail(policy, f"leaves job {job!r} waiting for ever: nothing runs and nothing will happen")


def hopeless(policy: str, job: str, times: int) -> PolicyError:
    """The error for a run in which a job is stopped again and again before it has got anywhere."""
    return fail(policy, f"stopped job {job!r} until it had lost its work {times:,} times over: it would never end")
