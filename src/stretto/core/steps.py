"""Sizes that a job may have: from its minimum up in steps of so many workers, or the minimum and powers of two.

Policies decide as if every size were possible. What they decide is then brought down to the next size that is, never
below the minimum, so nothing that ran stops and nothing that fitted stops fitting. `Snapshot.step` says which sizes
there are; without it every size is possible.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.request import POWERS_OF_TWO
from stretto.core.snapshot import IntArray, Snapshot


def possible(view: Snapshot, workers: IntArray) -> IntArray:
    """The largest size of each job that is possible and not above `workers`; 0 stays 0."""
    if view.step is None:
        return workers
    low, by = view.min_workers, np.maximum(view.step, 1)
    steps = low + (workers - low) // by * by
    powers = np.maximum(low, 2 ** np.log2(np.maximum(workers, 1)).astype(np.int64))
    size: IntArray = np.where(view.step == POWERS_OF_TWO, powers, steps)
    return np.where(workers >= low, size, workers)


def rounded(view: Snapshot, decision: Decision) -> Decision:
    """The decision at possible sizes; whoever got less than was decided is told so."""
    workers = possible(view, decision.workers)
    less = workers < decision.workers
    if not less.any():
        return decision
    detail = np.where(less[:, None], np.column_stack((workers, decision.workers)), decision.detail)
    return msgspec.structs.replace(
        decision,
        workers=workers,
        reason=np.where(less, np.int64(Reason.CUT_TO_STEP), decision.reason),
        detail=detail,
        nodes=None if decision.nodes is None else trimmed(view, decision.nodes),
    )


def trimmed(view: Snapshot, placed: IntArray) -> IntArray:
    """[job, node] workers at possible sizes: jobs give up their smallest pieces first."""
    had = placed.sum(axis=1)
    surplus = had - possible(view, had)
    if not surplus.any():
        return placed
    placed = placed.copy()
    for j in np.flatnonzero(surplus).tolist():
        for node in np.argsort(placed[j], kind="stable").tolist():
            gives = min(int(placed[j, node]), int(surplus[j]))
            placed[j, node] -= gives
            surplus[j] -= gives
    return placed
