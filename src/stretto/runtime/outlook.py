"""How many steps are still to come after the loop under way, as far as the script has shown: for the total in `ps`.

Where it counts epochs, each is taken to have the loops of the one before; the first, those seen so far.
"""

from __future__ import annotations


class Outlook:
    def __init__(self) -> None:
        self._first, self._left = 0, 0
        """The loop that the epoch began with, and how many epochs come after it."""
        self._before: dict[int, int] = {}
        """Steps of the loops of the epoch before, by their place in it."""
        self._steps: dict[int, int] = {}
        """The same of this one, up to the loop under way."""

    def epoch(self, first: int, left: int) -> None:
        """An epoch begins with this loop, and so many come after it."""
        self._first, self._left = first, left
        self._before, self._steps = self._steps or self._before, {}

    def over(self) -> None:
        """No epoch is left."""
        self._left, self._before, self._steps = 0, {}, {}

    def after(self, number: int, steps: int) -> int:
        """Steps to come after this loop, which has so many."""
        place = number - self._first
        self._steps[place] = steps
        epoch = self._before | self._steps
        return sum(n for at, n in epoch.items() if at > place) + self._left * sum(epoch.values())
