"""Everything placed with the fewest moves: what runs is moved only when a job would go short otherwise.

1. Place as `pack` does, moving nothing. If every job has its workers, that is the answer.
2. Make room for those that go short by moving a few narrow workers to other nodes.
3. Pack everything afresh on empty nodes without names, and give each the name of the real node (of the same kind)
   that already runs the most of it: the largest overlap of an assignment, so no other naming moves fewer workers.

The packing of step 3 is used when it places more than step 2, or all of it with fewer moves. Nobody ever loses workers
so that others get some.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement import assignment, clearing
from stretto.core.placement.pack import tightest
from stretto.core.placement.placing import Cells, Placing, by_size
from stretto.core.placement.room import reaches
from stretto.core.snapshot import FloatArray, IntArray, Snapshot

_NOBODY = Cells(*(np.empty(0, np.int64) for _ in range(3)))


def place(view: Snapshot, workers: IntArray, pool: IntArray) -> IntArray:
    """[job, node] workers; the running ones stay unless that leaves somebody out."""
    order = by_size(view, workers, pool)
    before = Cells.of(view.placed)
    placing = Placing(view, workers, pool)
    placing.settle(order, tightest)
    while not _complete(placing):
        clearing.make_room(placing, order)
        placing.settle(order, tightest)
        fresh = _repacked(placing, order)
        if fresh is None or (fresh.have == placing.have and not _complete(placing)):
            break
        anew = rename(view, before, fresh.cells())
        if fresh.have == placing.have and moves(before, placing.cells()) <= moves(before, anew):
            break
        placing = Placing(view, workers, pool, anew)
    return placing.matrix()


def _repacked(placing: Placing, order: list[int]) -> Placing | None:
    """Everything on empty nodes, if that leaves nobody with less: all at once, or first what each has now."""
    fresh = Placing(placing.view, np.array(placing.want, np.int64), placing.pool, _NOBODY)
    fresh.settle(order, tightest)
    if _complete(fresh):
        return fresh
    fresh = Placing(placing.view, np.array(placing.have, np.int64), placing.pool, _NOBODY)
    fresh.settle(order, tightest)
    if not _complete(fresh):
        return None
    fresh.want, fresh.least = placing.want, placing.least
    fresh.settle(order, tightest)
    return fresh


def moves(before: Cells, after: Cells) -> int:
    """Workers that leave one node and turn up on another."""
    jobs = int(max(before.job.max(initial=-1), after.job.max(initial=-1))) + 1
    nodes = int(max(before.node.max(initial=-1), after.node.max(initial=-1))) + 1
    _, old, new = np.intersect1d(
        before.job * nodes + before.node, after.job * nodes + after.node, assume_unique=True, return_indices=True
    )
    stayed = np.bincount(before.job[old], np.minimum(before.workers[old], after.workers[new]), jobs)
    went = np.bincount(before.job, before.workers, jobs) - stayed
    came = np.bincount(after.job, after.workers, jobs) - stayed
    return int(np.minimum(went, came).sum())


def rename(view: Snapshot, before: Cells, fresh: Cells) -> Cells:
    """The same packing with every node renamed, within its kind, so that the fewest running workers move."""
    if not len(before.job) or view.fixed_milli.any():
        return fresh
    overlap = _overlap(before, fresh, len(view.nodes.name))
    real = np.arange(len(overlap))
    for kind in _kinds(view):
        real[kind] = kind[assignment.largest(overlap[np.ix_(kind, kind)])]
    return fresh._replace(node=real[fresh.node])


def _overlap(before: Cells, fresh: Cells, nodes: int) -> FloatArray:
    """[fresh node, real node] workers that would not move if the one were the other."""
    first, last = np.searchsorted(before.job, fresh.job, "left"), np.searchsorted(before.job, fresh.job, "right")
    times = last - first
    new = np.repeat(np.arange(len(times)), times)
    old = np.arange(len(new)) - np.repeat(np.cumsum(times) - times, times) + first[new]
    stay = np.minimum(fresh.workers[new], before.workers[old])
    overlap = np.bincount(fresh.node[new] * nodes + before.node[old], stay, nodes * nodes).astype(np.float64)
    return overlap.reshape(nodes, nodes)


def _kinds(view: Snapshot) -> list[IntArray]:
    """Nodes that are equal in everything but the name."""
    nodes = view.nodes
    alike = np.zeros(len(nodes.name), np.int64) if view.reach is None else reaches(view.reach.T)[1]
    columns = np.column_stack(
        (nodes.pool, nodes.devices, nodes.cpu_milli, nodes.memory_mib, nodes.gpu_memory_mib, alike)
    )
    index = np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)
    return [np.flatnonzero(index == kind) for kind in range(int(index.max(initial=-1)) + 1)]


def _complete(placing: Placing) -> bool:
    return placing.have == placing.want
