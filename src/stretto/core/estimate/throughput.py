"""How many steps a job does in a second of the clock, with all that its script does beside them.

Windows of timed steps tell sizes apart; what is left of a job passes at another speed, since evaluations, checkpoints
and the work between two loops take time as well. So the steps that were counted are set against the time: the slope of
a line through what was heard of the last minutes. Of a line, because a script that evaluates now and then goes on in
leaps, and two moments would depend on where in a leap they lie. Starts, resizes and time beside neighbours that come or
go are cut out (`cut`).
"""

from __future__ import annotations

import math

_MEMORY_S = 300.0
"""What is older fades."""
_LEAST_S, _LEAST_STEPS, _LEAST_HEARD = 10.0, 3, 3
"""Before that, nobody knows."""


class Throughput:
    """Of one job at one size. `seen` for every heartbeat, `cut` when what comes next is not to be compared."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._steps = 0
        self._heard = 0
        self._square = self._product = 0.0
        """Sums of squared deviations of the time, and of its products with those of the steps."""
        self._last: tuple[float, int] | None = None
        """When the steps last became more, and what they were then."""
        self._weight = self._mean_s = self._mean = 0.0
        """Of what was heard since the last cut."""

    @property
    def rate(self) -> float:
        """Steps per second; 0: not known yet."""
        if self._spent_s < _LEAST_S or self._steps < _LEAST_STEPS or self._heard < _LEAST_HEARD:
            return 0.0
        return self._product / self._square if self._square > 0 else 0.0

    def since_s(self, steps: int) -> float | None:
        """When the time began that so many steps would be set against; None: they would not be."""
        return self._last[0] if self._last is not None and steps > self._last[1] else None

    def cut(self) -> None:
        """What passes until the next step counts nowhere."""
        self._last, self._weight = None, 0.0

    def seen(self, now_s: float, steps: int) -> None:
        """The job has done so many steps. Only more of them than before say when it did them."""
        if self._last is not None and now_s < self._last[0]:
            self.cut()  # The clock was set back.
        if self._last is not None and (steps <= self._last[1] or now_s == self._last[0]):
            return
        fade = 1.0
        if self._last is not None:
            passed_s = now_s - self._last[0]
            self._spent_s += passed_s
            self._steps += steps - self._last[1]
            fade = math.exp(-passed_s / _MEMORY_S)
        self._last, self._heard = (now_s, steps), self._heard + 1
        had = self._weight * fade
        self._weight = had + 1
        if not had:
            self._mean_s, self._mean = now_s, float(steps)
            return
        off_s, off = now_s - self._mean_s, steps - self._mean
        self._square = fade * self._square + had / self._weight * off_s**2
        self._product = fade * self._product + had / self._weight * off_s * off
        self._mean_s += off_s / self._weight
        self._mean += off / self._weight
