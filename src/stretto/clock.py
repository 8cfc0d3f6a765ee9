"""What time it is for a server: a line that nobody sets, and what people's clocks call its moments.

The machine's clock is set: by hand, by NTP once there is a network, by a hypervisor. Whatever is counted (limits,
back-offs, rests, retention, how long a job has run) is counted on a line of our own, in seconds that look like those
since 1970: it begins at the machine's clock and goes on with the kernel's time since the boot, which nobody sets and
which goes on while the machine sleeps. People are told what the machine's clock would have said (`told`), and what they
or files say is taken as such (`heard`).

A server that is started again on the same boot goes on with the same line (`resume`, by what `anchor` gave the last
one). After a start of the machine there is only the machine's clock: the line begins there, but never before the newest
moment that is written down. So at worst nothing seems to have happened in between; time never goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STEP_S = 0.5
"""Clocks that differ by less say the same: what was told once stays what it was."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Clock:
    """Called, it gives the seconds on the server's own line."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,  # noqa: TID251
        steady: Callable[[], float] | None = None,
        boot: str | None = None,
    ) -> None:
        """`wall`: the machine's clock; `steady`: what is never set, and starts anew with every `boot`."""
        self.wall = wall
        self._steady = since_boot if steady is None else steady
        self._boot = _boot() if boot is None else boot
        self._began_s = wall() - self._steady()
        """Where the line was, or would have been, at the boot."""
        self._apart_s = 0.0
        """How far the machine's clock is ahead of the line."""

    def __call__(self) -> float:
        return self._began_s + self._steady()

    def told(self, at_s: float) -> float:
        """A moment of the line, as the machine's clock has it."""
        return at_s + self._apart()

    def heard(self, at_s: float) -> float:
        """What the machine's clock says, on the line."""
        return at_s - self._apart()

    def resume(self, kept: Any, newest_s: float) -> None:
        """Go on where the last server was, by its anchor, and not before `newest_s`."""
        began_s = kept.get("began_s") if isinstance(kept, Mapping) and kept.get("boot") == self._boot else None
        if self._boot and isinstance(began_s, int | float):
            self._began_s = float(began_s)
        self._began_s = max(self._began_s, newest_s - self._steady())

    def anchor(self) -> dict[str, Any]:
        """What the next server on this boot needs to know."""
        return {"boot": self._boot, "began_s": self._began_s}

    def _apart(self) -> float:
        apart_s = self.wall() - self()
        if abs(apart_s - self._apart_s) > _STEP_S:
            self._apart_s = apart_s
        return self._apart_s


def since_boot() -> float:
    """Seconds since the machine was started, its sleep included; where nobody counts those, without it."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
