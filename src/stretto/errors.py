"""The error tree. Every error says what went wrong and what to change.

StrettoError                 exit code
├── UsageError               2   an unknown name, option or value on the command line or in the API
│   └── SpecError            2   a job file that cannot be accepted
├── TraceError               2   a trace or cluster file that cannot be read (names the row or job)
├── PolicyError              3   a policy raised, or broke one of its invariants (names the job)
├── MissingExtra             4   a part that needs an optional dependency which is not installed
├── NotFound                 5   no such job, node, token, …
├── Conflict                 6   it is not in a state in which that can be done; a name that is taken
├── Denied                   7   no token, a wrong one, or not the right to do that
├── Unavailable              8   the server cannot be reached, or cannot do it now; try again later
├── Impossible               9   a job that could never run here
├── Occupied                10   a port or data directory that somebody else uses
├── WrongKey                11   whoever answers is not known to be the server: nothing was sent
└── TooMany                 12   somebody has as many streams open as they may

`stretto.store` and `stretto.backends` add their own, with exit codes from 20 on.
"""

from __future__ import annotations

from typing import NamedTuple


class StrettoError(Exception):
    """Base of all our errors: a code for machines, a message and a hint for people."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(StrettoError):
    code = "usage"
    exit_code = 2


class Problem(NamedTuple):
    """One thing that is wrong with a job file."""

    line: int
    """From 1; 0 when there is none to point at."""
    field: str
    text: str


class SpecError(UsageError):
    code = "spec"

    def __init__(self, message: str, *, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.problems = problems


class TraceError(StrettoError):
    code = "trace"
    exit_code = 2


class PolicyError(StrettoError):
    code = "policy"
    exit_code = 3


class MissingExtra(StrettoError):
    code = "missing-extra"
    exit_code = 4


class NotFound(StrettoError):
    code = "not-found"
    exit_code = 5


class Conflict(StrettoError):
    code = "conflict"
    exit_code = 6


class Denied(StrettoError):
    code = "denied"
    exit_code = 7


class Unavailable(StrettoError):
    code = "unavailable"
    exit_code = 8


class Impossible(StrettoError):
    code = "impossible"
    exit_code = 9


class Occupied(StrettoError):
    code = "occupied"
    exit_code = 10


class WrongKey(StrettoError):
    """Not to be tried again: somebody has to look first."""

    code = "wrong-key"
    exit_code = 11


class TooMany(StrettoError):
    """Of one's own: it is no use to wait for others."""

    code = "too-many"
    exit_code = 12


def unknown(kind: str, name: str, known: list[str]) -> UsageError:
    """The error for a name that is not in a table: it lists what is, and guesses what was meant."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"unknown {kind} {name!r}", hint=f"{guess}known: {', '.join(sorted(known))}")
