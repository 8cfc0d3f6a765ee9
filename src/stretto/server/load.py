"""From what a service is asked to do to how many replicas it should have.

More at once, fewer slowly: a wish for more counts at once, one for fewer only when nothing more was wished for during
the whole `hold_s`. What is within a tenth of the target changes nothing.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from stretto.backends.local import containment

TOLERANCE = 0.1
WINDOW_S = 5.0
_SHORTEST_S = 0.5
"""What a count says over less than that is noise."""


@dataclass
class Rate:
    """How fast a count grows, over the last seconds. A count that falls has begun anew: its process was restarted."""

    window_s: float = WINDOW_S
    _seen: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now_s: float, count: float) -> float:
        """Take a look in; the growth per second."""
        if self._seen and count < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - self.window_s:
            self._seen.popleft()
        then_s, before = self._seen[0]
        span_s = now_s - then_s
        return (count - before) / span_s if span_s >= _SHORTEST_S else 0.0

    def clear(self) -> None:
        self._seen.clear()


def wish(load: float, each: float, now: int) -> int:
    """Replicas for so much load when each should carry so much, and there are so many now."""
    if now and abs(load / (now * each) - 1) <= TOLERANCE:
        return now
    # What a sum of measurements is off by must not cost a replica.
    return math.ceil(load / each - 1e-9)


@dataclass
class Wishes:
    """The largest wish of the last while."""

    hold_s: float
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """Ascending in time, descending in size: who is followed by a larger one does not matter any more."""

    def add(self, now_s: float, size: int) -> int:
        while self._seen and self._seen[-1][1] <= size:
            self._seen.pop()
        self._seen.append((now_s, size))
        while self._seen[0][0] < now_s - self.hold_s:
            self._seen.popleft()
        return self._seen[0][1]


def cpu_s(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds of each process with all of its descendants, those that have ended included."""
    return {pid: used for pid in pids if (used := _tree_cpu_s(pid)) is not None}


def _tree_cpu_s(pid: int) -> float | None:
    own = _ticks(pid)
    if own is None:
        return None
    return (own + sum(_ticks(child) or 0 for child in containment.offspring(pid))) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int | None:
    """Of a process and its children that have ended; None: it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return sum(int(word) for word in words[11:15])
