"""Device types for policies that do not choose them: decide on one merged pool, then give each job one.

A job keeps its pool while it has room there; the others take, widest first, the pool with the most room left.
An elastic job that fits nowhere in full takes what the roomiest pool has, if that is its minimum at least.
No job is sent where it makes no progress while it would elsewhere.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot


def merged(view: Snapshot) -> Snapshot:
    """The same cluster as if all devices were of the first type."""
    nodes = msgspec.structs.replace(view.nodes, pool=np.zeros_like(view.nodes.pool))
    return msgspec.structs.replace(
        view,
        pools=(view.pools[0],),
        capacity=np.array([view.total_milli], np.int64),
        nodes=nodes,
        pool=np.minimum(view.pool, 0),
    )


def assign(view: Snapshot, decision: Decision) -> Decision:
    """Give every running job of a merged decision a pool it fits in."""
    free = view.capacity.astype(np.int64).copy()
    workers, reason, detail = decision.workers.copy(), decision.reason.copy(), decision.detail.copy()
    pool = np.maximum(view.pool, 0)
    need = workers * view.width + view.fixed_milli
    runs = np.flatnonzero(workers)
    stays, useless = view.pool[runs] >= 0, _useless(view, workers)
    for j in runs[np.lexsort((view.job[runs], -need[runs], ~stays))].tolist():
        old = int(view.pool[j])
        room = np.where(useless[:, j], -1, free)
        best = old if old >= 0 and need[j] <= room[old] else int(np.argmax(room))
        if need[j] > room[best]:
            most = (int(room[best]) - int(view.fixed_milli[j])) // max(int(view.width[j]), 1)
            workers[j] = min(most, workers[j]) if most >= view.min_workers[j] else 0
            if not workers[j]:
                reason[j], detail[j] = Reason.FRAGMENTED, (decision.workers[j], room[best] / GPU)
                continue
        pool[j] = best
        free[best] -= workers[j] * view.width[j] + view.fixed_milli[j]
    return msgspec.structs.replace(decision, workers=workers, pool=pool, reason=reason, detail=detail, nodes=None)


def _useless(view: Snapshot, workers: IntArray) -> BoolArray:
    """[pool, job] where a job would make no progress, but somewhere else it would."""
    speed = np.stack([view.rate(workers, pool) for pool in range(len(view.pools))])
    useless: BoolArray = (speed == 0) & speed.any(axis=0)
    return useless
