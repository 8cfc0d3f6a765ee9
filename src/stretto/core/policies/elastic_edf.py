"""Earliest deadline first, each job as wide as it goes: ElasticFlow's baseline."""

from __future__ import annotations

import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


@policy(
    "elastic-edf",
    traits=Traits(preempts="higher", elastic=True, sees_falls=True, uses=frozenset({"deadline"})),
)
def elastic_edf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """In order of deadline, every job gets its widest level that fits, even where fewer workers are faster.

    Levels are the minimum, the powers of two above it, and the maximum. No admission; jobs past their deadline run.
    """
    n = len(view)
    workers = np.zeros(n, np.int64)
    reason = np.full(n, Reason.NO_ROOM, np.int64)
    left = np.zeros(n)
    free = view.total_milli
    need = view.min_workers * view.width + view.fixed_milli
    for j in np.lexsort((view.job, view.deadline_s)).tolist():
        left[j] = free
        room = (free - int(view.fixed_milli[j])) // max(int(view.width[j]), 1)
        workers[j] = _widest(int(view.min_workers[j]), int(view.max_workers[j]), room)
        if workers[j]:
            free -= int(workers[j] * view.width[j] + view.fixed_milli[j])
            reason[j] = Reason.RUNS
        elif view.workers[j]:
            reason[j] = Reason.PREEMPTED
    taken = np.where(workers > 0, workers * view.width + view.fixed_milli, need)
    return Decision.of(view, workers, reason, taken / GPU, left / GPU)


def _widest(low: int, high: int, room: int) -> int:
    """The largest level within `room` workers, 0 if not even the minimum fits."""
    if room >= high:
        return high
    if room < low:
        return 0
    return max(low, 1 << (room.bit_length() - 1))
