"""How long the steps of one worker take, in windows of a few of them.

A step lasts from one request for a batch to the next, whatever it is made of (micro-batches, accumulated batches): what
is measured is the time that it costs the job. Steps that tell nothing of a size do not count: the first after a switch,
those while the next generation is prepared, those with a checkpoint, those that were taken back, and those that took
several times as long as the others, because the script did something else (an evaluation, an upload). These last are
counted apart: one of them is a hiccup, but those that come again and again are a part of what a step costs.

A window is complete after eight steps and 0.3 s; the first one of a generation already after three. Where steps are
slow, three of them that took half a minute together are one as well: nobody should wait for ten minutes to learn a
speed. Then the next window begins.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

_UNSETTLED = 2
"""Steps after a switch that do not count."""
_STEPS, _LENGTH_S = 8, 0.3
_FEW_STEPS, _LONG_S = 3, 30.0
_ELSEWHERE = 3.0
"""A step that took so many times as long as the middle one of its window: the script was elsewhere."""
_ROBUST = 1.4826
"""From the median of absolute deviations to a standard deviation."""


@dataclass(frozen=True)
class Window:
    """Steps of one generation; the times are of the clock that they were taken with."""

    number: int
    """Ascending over all generations of this worker."""
    generation: int
    members: int
    count: int
    median_s: float
    spread_s: float
    """A standard deviation of single steps that outliers do not disturb."""
    mean_s: float
    """Of the same steps."""
    began_s: float
    ended_s: float
    first: bool = False
    """The first of its generation."""
    slow: int = 0
    """Steps besides `count`, in between, that took several times as long."""
    slow_s: float = 0.0
    """What these took together."""


class Pace:
    """Of one worker. `enter` for every generation, `begin` for every loop, `step` after every step."""

    def __init__(self, clock: Callable[[], float], first_steps: int = _FEW_STEPS) -> None:
        """`first_steps`: so many make the first window of a generation."""
        self._clock, self._first_steps = clock, first_steps
        self._generation, self._members = 0, 1
        self._number = 0
        self._is_first = True
        self._unsettled = 0
        self._since_s = clock()
        """When the step under way began."""
        self._steps_s: list[float] = []
        self._length_s = 0.0
        """Of all these together."""
        self._slow_s: list[float] = []
        """Those that the script spent elsewhere."""
        self._began_s = 0.0

    def enter(self, generation: int, members: int) -> None:
        """A switch: the window that was under way is dropped, and with it a step that was taken back."""
        self._generation, self._members = generation, members
        self._is_first, self._unsettled = True, _UNSETTLED
        self._keep([])
        self._slow_s = []
        self.begin()

    def begin(self) -> None:
        """A step begins now: what the script did between two loops is no part of it."""
        self._since_s = self._clock()

    def step(self, *, counts: bool = True) -> Window | None:
        """A step is done, and the next one begins; the window that it completes, if it does."""
        began_s, now_s = self._since_s, self._clock()
        self._since_s = now_s
        if self._unsettled:
            self._unsettled -= 1
        elif counts:
            return self._add(began_s, now_s)
        return None

    def _add(self, began_s: float, now_s: float) -> Window | None:
        if not self._steps_s and not self._slow_s:
            self._began_s = began_s
        self._steps_s.append(now_s - began_s)
        self._length_s += now_s - began_s
        if not self._suffices():
            return None
        longest_s = _ELSEWHERE * statistics.median(self._steps_s)
        self._slow_s += [step_s for step_s in self._steps_s if step_s > longest_s]
        self._keep([step_s for step_s in self._steps_s if step_s <= longest_s])
        return self._close(now_s) if self._suffices() else None

    def _keep(self, steps_s: list[float]) -> None:
        self._steps_s, self._length_s = steps_s, sum(steps_s)

    def _suffices(self) -> bool:
        count, length_s = len(self._steps_s), self._length_s
        # A first impression of a new size is worth having soon.
        steps = self._first_steps if self._is_first else _STEPS
        return (count >= steps and length_s >= _LENGTH_S) or (count >= _FEW_STEPS and length_s >= _LONG_S)

    def _close(self, now_s: float) -> Window:
        steps_s, slow_s = self._steps_s, self._slow_s
        self._keep([])
        self._slow_s = []
        is_first, self._is_first = self._is_first, False
        self._number += 1
        return Window(
            number=self._number,
            generation=self._generation,
            members=self._members,
            count=len(steps_s),
            median_s=statistics.median(steps_s),
            spread_s=spread_s(steps_s),
            mean_s=statistics.fmean(steps_s),
            began_s=self._began_s,
            ended_s=now_s,
            first=is_first,
            slow=len(slow_s),
            slow_s=math.fsum(slow_s),
        )


def spread_s(steps_s: list[float]) -> float:
    """A robust standard deviation."""
    middle_s = statistics.median(steps_s)
    return _ROBUST * statistics.median(abs(step_s - middle_s) for step_s in steps_s)
