"""Standard input, output and error as they really come: closed, in another encoding, or with nobody who reads them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


def prepare() -> None:
    """After this all three are there, and take every text."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # Closed (`>&-`). Who wants no output gets none.
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def unread(stream: TextIO) -> Iterator[None]:
    """Who reads what is written there may leave (`| head`); the work goes on."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """What is written there, or waits to be, goes nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
