"""How many steps are still to come after the loop under way, as far as the script has shown: for the total in `ps`.

Where it counts epochs, each is taken to have the loops of the one before; the first, those seen so far.
"""

from __future__ import annotations

import itertools


class Outlook:
    def __init__(self) -> None:
        self._first, self._left = 0, 0
        """The loop that the epoch began with, and how many epochs come after it."""
        self._counts = False
        """Whether an epoch is under way."""
        self._before: list[int] = []
        """From each place in the epoch before, the steps of the loops from there on."""
        self._steps: dict[int, int] = {}
        """Of the loops of this one, up to the loop under way."""
        self._sum = 0

    def epoch(self, first: int, left: int) -> None:
        """An epoch begins with this loop, and so many come after it."""
        if self._counts and self._steps:
            each = [self._steps.get(place, 0) for place in range(max(self._steps) + 1)]
            self._before = list(itertools.accumulate(reversed(each)))[::-1]
        self._first, self._left, self._counts = first, left, True
        self._steps, self._sum = {}, 0

    def over(self) -> None:
        """No epoch is left."""
        self._counts, self._before, self._steps = False, [], {}

    def after(self, number: int, steps: int) -> int:
        """Steps to come after this loop, which has so many."""
        if not self._counts:
            return 0
        place = number - self._first
        self._sum += steps - self._steps.get(place, 0)
        self._steps[place] = steps
        rest = self._before[place + 1] if place + 1 < len(self._before) else 0
        return rest + self._left * (self._sum + rest)
