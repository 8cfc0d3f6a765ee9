"""What is expected of a job, for people: seconds on the workers it asks for, how sure that is, and why.

Made of the same snapshot columns that policies see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from stretto.core.snapshot import Snapshot
from stretto.server.lengths import Source, Total, speed


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """How long a job runs in all on the workers it asks for."""

    seconds: float | None = None
    """None: nobody knows."""
    left_s: float | None = None
    """What is left: on the workers it has, while it waits on those it asks for."""
    sd: float | None = None
    """Standard deviation of the logarithm of the work left; 0: exact."""
    source: Source = "unknown"
    runs: int = 0
    """Earlier runs of its class that it was learned from."""
    text: str = ""


_NOBODY = "nobody knows how long it runs: no job of its class has ended, and its job file does not say what to expect"
_NOT_YET = "its number of steps is known, but not yet how long one takes"


def expected(view: Snapshot, totals: Sequence[Total], timed: Sequence[bool]) -> list[Expected]:
    """For every job of the view. `timed`: whether the speed of its steps is known; without that a number of steps says
    nothing of seconds."""
    asked = speed(view.rates, view.curve, view.asked, view.pool)
    now = speed(view.rates, view.curve, np.where(view.workers > 0, view.workers, view.asked), view.pool)
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds, left_s = (view.done + view.remaining) / asked, view.remaining / now
    told = (column.tolist() for column in (seconds, left_s, view.remaining_sd))
    return [_expected(*one) for one in zip(*told, totals, timed, strict=True)]


def _expected(seconds: float, left_s: float, sd: float, total: Total, timed: bool) -> Expected:
    if not timed and total.on == 0 and total.source != "unknown":
        return Expected(source=total.source, runs=total.runs, text=_NOT_YET)
    if not math.isfinite(left_s):
        return Expected(text=_NOBODY)
    text = _sentence(seconds, total.source, total.runs)
    return Expected(seconds=seconds, left_s=left_s, sd=sd, source=total.source, runs=total.runs, text=text)


def _sentence(seconds: float, source: Source, runs: int) -> str:
    earlier = "1 earlier run" if runs == 1 else f"{runs} earlier runs"
    why = {
        "total": "its steps at the speed they have", "hint": "as its job file says",
        "class": f"{earlier} of its class", "unknown": "",
    }[source]  # fmt: skip
    return f"expected to run {span(seconds)} ({why})"


def span(seconds: float) -> str:
    """`6.2 s`, `12 min`, `3.5 h`."""
    for unit, length_s, most in (("s", 1.0, 120.0), ("min", 60.0, 120.0), ("h", 3600.0, 72.0)):
        if seconds / length_s < most:
            return f"{seconds / length_s:.2g} {unit}" if seconds / length_s < 10 else f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d" if seconds < math.inf else "for ever"
