"""Keeps a process to its share of a core where the system has no quota for it: it rests between steps.

What was not used is not saved up for later, beyond a second of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

VARIABLE = "STRETTO_CPU_SHARE"
_CREDIT_S = 1.0
_LONGEST_S = 5.0


class Pacer:
    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        """`share` is in cores; 0 or less: no limit."""
        self._share, self._clock, self._used, self._rest = share, clock, used, rest
        self._due_s = clock()
        """When what was used so far may have been used."""
        self._counted_s = used()

    def pause(self) -> None:
        """Between two steps: rest until the time used fits the share."""
        if self._share <= 0:
            return
        now_s, used_s = self._clock(), self._used()
        self._due_s = max(self._due_s, now_s - _CREDIT_S) + (used_s - self._counted_s) / self._share
        self._counted_s = used_s
        if self._due_s > now_s:
            self._rest(min(self._due_s - now_s, _LONGEST_S))


def from_environment() -> Pacer:
    """What the variable says; no limit without it."""
    try:
        return Pacer(float(os.environ.get(VARIABLE, "0")))
    except ValueError:
        return Pacer(0.0)
