"""Device types for policies that do not choose them: decide on one merged pool, then give each job one.

First the least that everybody may have (its minimum; under rigid policies all that was decided): a job keeps its pool
while there is room for that; the others take, widest first, the pool with the most room left. Then, in the same order,
the rest: in its pool if all of it fits there, otherwise in the roomiest one, as much as that has. So nobody stops
running because another one grows. No job is sent where it makes no progress while it would elsewhere. Whoever gets less
than was decided is told so.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core import reasons
from stretto.core.decision import Decision
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


def assign(view: Snapshot, decision: Decision, least: IntArray) -> Decision:
    """Give every running job of a merged decision a pool with room for at least `least` of its workers, or none."""
    workers, reason, detail = decision.workers.copy(), decision.reason.copy(), decision.detail.copy()
    pool, free = np.maximum(view.pool, 0), view.capacity.astype(np.int64).copy()
    low, high = least * view.width + view.fixed_milli, workers * view.width + view.fixed_milli
    runs, useless = np.flatnonzero(workers), _useless(view, workers)
    order = runs[np.lexsort((view.job[runs], -high[runs], view.pool[runs] < 0))].tolist()

    def cut(j: int, to: int, room: int) -> None:
        workers[j] = to
        reason[j], *numbers = reasons.fragmented(int(decision.workers[j]), to, room / GPU)
        detail[j] = numbers

    for j in order:
        old, room = int(view.pool[j]), np.where(useless[:, j], -1, free)
        best = old if old >= 0 and low[j] <= room[old] else int(np.argmax(room))
        if low[j] <= room[best]:
            pool[j] = best
            free[best] -= low[j]
        else:
            cut(j, 0, room[best])
    for j in order:
        if workers[j]:
            free[pool[j]] += low[j]
            room = np.where(useless[:, j], -1, free)
            best = int(np.argmax(room))
            pool[j] = best if high[j] > room[pool[j]] < room[best] else pool[j]
            if high[j] > room[pool[j]]:
                cut(j, int((room[pool[j]] - view.fixed_milli[j]) // view.width[j]), room[pool[j]])
            free[pool[j]] -= workers[j] * view.width[j] + view.fixed_milli[j]
    return msgspec.structs.replace(decision, workers=workers, pool=pool, reason=reason, detail=detail, nodes=None)


def _useless(view: Snapshot, workers: IntArray) -> BoolArray:
    """[pool, job] where a job would make no progress, but somewhere else it would."""
    speed = np.stack([view.rate(workers, pool) for pool in range(len(view.pools))])
    useless: BoolArray = (speed == 0) & speed.any(axis=0)
    return useless
