"""How soon the policy may be asked again: decisions must not take up all the time there is."""

from __future__ import annotations

from typing import NamedTuple

_MOST_TIMES = 4


class Rest(NamedTuple):
    """After a single decision the next may come soon; the more follow each other at once, the longer the rests. What
    happens meanwhile is one decision's work."""

    over_s: float = 0.0
    length_s: float = 0.0
    times: int = 1
    """As long as the decision before it took."""

    def after(self, began_s: float, ended_s: float, took_s: float) -> Rest:
        """The rest after a decision that followed this one."""
        at_once = began_s < self.over_s + self.length_s
        times = min(2 * self.times, _MOST_TIMES) if at_once else 1
        return Rest(ended_s + times * took_s, times * took_s, times)
