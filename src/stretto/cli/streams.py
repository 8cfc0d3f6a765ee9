"""Standard input, output and error as they really come: closed, in another encoding, or with nobody who reads them.

What is printed passes `visible.Guarded`: other people's texts do not reach a terminal as commands for it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, cast

from stretto.visible import Guarded, behind


@contextmanager
def prepared() -> Iterator[None]:
    """All three are there, take every text, and let nothing through that is not seen."""
    _prepare()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, Guarded(behind(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _prepare() -> None:
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
