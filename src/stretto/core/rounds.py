"""Rounds: a policy that decides at multiples of some seconds only, and leaves everything as it is in between.

The policy's memory holds when the next round starts; `None` means that there are no rounds.
"""

from __future__ import annotations

import math

import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot


def next_start(now_s: float, round_s: float) -> float | None:
    """The first multiple of `round_s` after now."""
    if round_s <= 0:
        return None
    return max((math.floor(now_s / round_s) + 1) * round_s, math.nextafter(now_s, math.inf))


def too_early(view: Snapshot, due_s: float | None) -> bool:
    """Whether the next round is still to come. Lost or reclaimed capacity ends a round at once."""
    fits = bool((view.used_milli(view.workers, view.pool) <= view.capacity).all())
    return due_s is not None and view.now_s < due_s and fits


def keep(view: Snapshot, due_s: float) -> Decision:
    """Everything as it is, until the next round."""
    n = len(view)
    reason = np.full(n, np.int64(Reason.WAITS_FOR_ROUND))
    pool = np.maximum(view.pool, 0)
    return Decision.of(view, view.workers, reason, due_s - view.now_s, pool=pool, memory=due_s, wake_s=due_s)
