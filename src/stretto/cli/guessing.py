"""A job that is not there: perhaps another one was meant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from stretto.errors import NotFound, StrettoError

if TYPE_CHECKING:
    from stretto.client import Client

_LOOKED_THROUGH = 1000


@contextmanager
def guessing(client: Client, ref: str) -> Iterator[None]:
    """Adds the closest name to the error's hint."""
    try:
        yield
    except NotFound as error:
        if repr(ref) not in error.message or ref.isdecimal():
            raise
        close = closest(client, ref)
        raise NotFound(error.message, hint=f"did you mean {close!r}? {error.hint}" if close else error.hint) from None


def closest(client: Client, ref: str) -> str:
    import difflib

    try:
        names = {job.name for job in client.jobs(limit=_LOOKED_THROUGH)}
    except StrettoError:
        return ""
    return next(iter(difflib.get_close_matches(ref, sorted(names), n=1)), "")
