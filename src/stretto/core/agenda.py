"""When the policy is asked: when something happens, when it wants to be, and not all the time.

The same in every world. A policy of rounds is asked at its own times only, unless room was lost or a service needs
some (`urgent`). After an answer there is a rest: decisions must not take up all the time there is, and what happens
meanwhile is one decision's work.
"""

from __future__ import annotations

import math

import msgspec

_MOST_TIMES = 4


class Agenda(msgspec.Struct, frozen=True, kw_only=True):
    wake_s: float = -math.inf
    """When the policy is asked, if the rest is over by then. At first: at once."""
    rest_s: float = -math.inf
    """Until when it is left alone."""
    length_s: float = 0.0
    """How long that rest is; it grows with decisions that follow each other at once."""
    times: int = 1

    def touched(self, now_s: float, *, rounds: bool, urgent: bool = False) -> Agenda:
        """After something happened. `rounds`: the policy decides at its own times."""
        if rounds and self.wake_s < math.inf and not urgent:
            return self
        return msgspec.structs.replace(self, wake_s=min(self.wake_s, now_s))

    def answered(self, began_s: float, ended_s: float, took_s: float, wake_s: float, gap_s: float = 0.0) -> Agenda:
        """After a decision that took so long, and wants to be made again at `wake_s`."""
        at_once = began_s < self.rest_s + self.length_s
        times = min(2 * self.times, _MOST_TIMES) if at_once else 1
        length_s = max(times * took_s, gap_s)
        return Agenda(wake_s=wake_s, rest_s=ended_s + length_s, length_s=length_s, times=times)

    def due_s(self, slot_s: float = 0.0) -> float:
        """When the policy is asked next, as things are; at multiples of `slot_s`, if that is given."""
        ask_s = max(self.wake_s, self.rest_s)
        return math.ceil(ask_s / slot_s) * slot_s if slot_s and abs(ask_s) < math.inf else ask_s
