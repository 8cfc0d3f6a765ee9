"""What both clients must remember while they listen: the last event, the bytes of a log seen, how long to be patient.

Nothing here does I/O: lines and messages go in, events and pieces come out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from stretto.client.documents import Event, Job, Piece
from stretto.errors import Unavailable

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 2.0
SILENCE_S = 60.0
"""A stream says something more often than that; if not, the connection is taken for dead."""
RESTART_S = 300.0
"""So long a listener waits for a server that has gone, unless told otherwise."""


class Patience:
    """Tries again and again, ever more slowly, until it has waited long enough in vain."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._since_s: float | None = None
        self._delay_s = _FIRST_DELAY_S

    def worked(self) -> None:
        self._since_s, self._delay_s = None, _FIRST_DELAY_S

    def failed(self, error: Unavailable) -> float:
        """How long to wait before the next try; or the error, when there will be none."""
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= self._most_s:
            raise error
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, _LONGEST_DELAY_S)
        return delay_s


class Feed:
    """Server-sent events, line by line. `last` is where the next connection goes on."""

    def __init__(self, after: int | None = None) -> None:
        self.last = after
        self._data: list[str] = []

    def line(self, line: str) -> Event | None:
        """The event that this line completes."""
        if not line:
            data, self._data = self._data, []
            return self._event("\n".join(data)) if data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        return None

    def broken(self) -> None:
        """The connection is gone; half an event goes with it."""
        self._data = []

    def _event(self, data: str) -> Event | None:
        told = json.loads(data)
        if not isinstance(told, dict) or "seq" not in told:
            return None
        event = Event(told)
        if self.last is not None and event.seq <= self.last:
            return None
        self.last = event.seq
        return event


class Log:
    """The log of a job, piece by piece; what was seen before a connection broke is not seen again."""

    def __init__(self) -> None:
        self.ended = False
        self.begun = False
        self._next: dict[str, int] = {}
        self._skip: dict[str, int] = {}
        """Up to which byte a new connection repeats what is known. Only there are offsets compared: a byte that was
        not UTF-8 arrives as another character, so that lengths can be out by a little."""

    def message(self, text: str | bytes) -> Piece | None:
        told = json.loads(text)
        self.begun = True
        if "end" in told:
            self.ended = True
            return None
        return self._unseen(told) if "text" in told else None

    def broken(self) -> None:
        """The connection is gone; the next one begins at the beginning."""
        self._skip = dict(self._next)

    def _unseen(self, told: dict[str, Any]) -> Piece | None:
        worker, text, offset = str(told["worker"]), str(told["text"]), int(told["offset"])
        raw = text.encode()
        end, skip = offset + len(raw), self._skip.get(worker, 0)
        if end <= skip:
            return None
        self._next[worker] = end
        return Piece(worker, text if offset >= skip else raw[skip - offset :].decode(errors="replace"))


def is_last(event: Event, job: Job) -> bool:
    return event.job == job.number and event.kind == "ended"
