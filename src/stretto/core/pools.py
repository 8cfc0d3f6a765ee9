"""Device types for policies that do not choose them: decide on one merged pool, then give each job one.

A job keeps its pool while it has room there; the others take, widest first, the pool with the most room left.
An elastic job that fits nowhere in full takes what the roomiest pool has, if that is its minimum at least.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


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
    stays = view.pool[runs] >= 0
    for j in runs[np.lexsort((view.job[runs], -need[runs], ~stays))].tolist():
        old = int(view.pool[j])
        best = old if old >= 0 and need[j] <= free[old] else int(np.argmax(free))
        if need[j] > free[best]:
            most = (int(free[best]) - int(view.fixed_milli[j])) // max(int(view.width[j]), 1)
            workers[j] = min(most, workers[j]) if most >= view.min_workers[j] else 0
            if not workers[j]:
                reason[j], detail[j] = Reason.FRAGMENTED, (decision.workers[j], free[best] / GPU)
                continue
        pool[j] = best
        free[best] -= workers[j] * view.width[j] + view.fixed_milli[j]
    return msgspec.structs.replace(decision, workers=workers, pool=pool, reason=reason, detail=detail)
