"""What went wrong with one job: that job waits, or fails; everybody else goes on.

Whatever is done for a job in a turn of the loop may fail for reasons of that job alone: its folder cannot be made, its
journal is damaged, or we have made a mistake that only its state brings to light. Here is which of them end it, how
long it is left alone after the others, and how they are told.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto import jobfiles
from stretto.accounts import AccountRefused
from stretto.backends.protocol import Exit
from stretto.control.journal import JournalError
from stretto.jobfiles import Spoilt
from stretto.jobs.model import Seat, Worker
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Judgement, Surroundings

_FIRST_S, _LONGEST_S = 1.0, 60.0
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Trouble:
    """Of a job, at this moment."""

    text: str
    until_s: float
    """Nothing more is done for it before."""
    times: int = 1
    """In a row."""


def next_trouble(before: Trouble | None, text: str, now_s: float) -> Trouble:
    times = 1 if before is None else before.times + 1
    return Trouble(text, now_s + min(_LONGEST_S, _FIRST_S * 2 ** min(times - 1, 20)), times)


def is_final(error: Exception) -> bool:
    """Whether it will be the same the next time."""
    return isinstance(error, (Spoilt, JournalError, AccountRefused))


def is_the_machines(error: Exception) -> bool:
    """Whether others have it too: it is not held against the job."""
    return isinstance(error, TimeoutError) or jobfiles.passes(error)


def told(error: Exception) -> str:
    """In words, for whoever looks after the job."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}"
    elif isinstance(error, TimeoutError):
        text = "its folder does not answer"
    elif is_final(error):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:_LONGEST_TEXT].encode(errors="replace").decode()


class Abandoned(Driver):
    """Of a job that cannot be driven: what still runs of it is ended."""

    def __init__(self, active: Active, surroundings: Surroundings, end: End) -> None:
        super().__init__(active, surroundings)
        self.end = end

    @property
    def joined(self) -> frozenset[str]:
        return frozenset()

    @property
    def failing(self) -> bool:
        return True

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        return {}

    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        return self.end
