"""How much work is left, and how sure that is."""

from __future__ import annotations

import numpy as np

from stretto.core.snapshot import FloatArray, Snapshot

_AT_LEAST_S = 60.0
"""A job of which nothing is known, not even a past, is taken to last so long."""


def expected_steps(view: Snapshot) -> FloatArray:
    """Steps that each job has left: as known, else as the finished jobs of its class suggest. Never nan.

    Of those that took longer than this one has come so far, the mean of what they had left. Without any, a job is
    expected to last as long again as it has, and a minute at least.
    """
    left = view.remaining.copy()
    unknown = np.flatnonzero(np.isnan(left))
    if not len(unknown):
        return left
    speed = _speed(view)
    came_s = np.divide(view.done, speed, out=np.zeros(len(view)), where=speed > 0)
    sizes: dict[int, FloatArray] = {}
    for j in unknown.tolist():
        klass = int(view.klass[j])
        if klass not in sizes:
            sizes[klass] = _sizes(view, klass)
        left[j] = mean_left_s(sizes[klass], float(came_s[j])) * speed[j]
    return left


def mean_left_s(sizes_s: FloatArray, came_s: float) -> float:
    """What jobs of these sizes (ascending) have left on average after so many seconds."""
    longer = sizes_s[np.searchsorted(sizes_s, came_s, side="right") :]
    if len(longer):
        return float(longer.mean()) - came_s
    return max(came_s, _AT_LEAST_S)


def _speed(view: Snapshot) -> FloatArray:
    """Steps per second on the minimum of workers, in which history counts; at best, where that makes no progress."""
    own = np.maximum(view.pool, 0)
    speed = view.rates[own, view.curve, np.minimum(view.min_workers, view.rates.shape[2] - 1)]
    best: FloatArray = np.where(speed > 0, speed, view.rates[own, view.curve].max(axis=1))
    return best


def _sizes(view: Snapshot, klass: int) -> FloatArray:
    """Of the class, or of everyone where it is new; ascending."""
    own = view.history.of_class(klass).size_s
    return np.sort(own if len(own) else view.history.size_s)
