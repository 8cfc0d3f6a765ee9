"""Every job on as few nodes as possible: at most one of its nodes is left partly to others.

New workers go where `pack` would put them. A running job that spans more nodes than it must is brought together:
that is the only reason for a move, and it is made only when it saves the job a node.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement.pack import tightest
from stretto.core.placement.placing import Placing, by_size
from stretto.core.snapshot import IntArray, Snapshot


def place(view: Snapshot, workers: IntArray, pool: IntArray) -> IntArray:
    """[job, node] workers, every job on the fewest nodes that the room allows."""
    placing = Placing(view, workers, pool)
    order = by_size(view, workers, pool)
    placing.settle(order, tightest)
    while sum(_gather(placing, j) for j in order):
        placing.settle(order, tightest)
    return placing.matrix()


def _gather(placing: Placing, j: int) -> bool:
    """Bring one job together if it needs fewer nodes than it has; whether it did."""
    old = placing.pieces[j]
    if len(old) < 2 or placing.role[j] >= 0:
        return False
    rooms = placing.room.rooms(placing.shape[j]).copy()
    for node, count in old.items():
        rooms[node] += count
    # Among equally roomy nodes those that hold the most of it already: fewer workers move.
    mine = np.zeros(len(rooms), np.int64)
    mine[list(old)] = list(old.values())
    nodes = np.lexsort((-mine, -rooms))[: len(old) - 1]
    if int(rooms[nodes].sum()) < placing.have[j]:
        return False
    return _move(placing, j, old, rooms, mine, nodes)


def _move(placing: Placing, j: int, old: dict[int, int], rooms: IntArray, mine: IntArray, nodes: IntArray) -> bool:
    workers = placing.have[j]
    placing.release(j)
    for node in nodes.tolist():
        rest = workers - placing.have[j]
        holds = np.flatnonzero(rooms >= rest)
        if len(holds):
            node = int(holds[np.lexsort((rooms[holds], -mine[holds]))[0]])
        placing.take(j, node, rest)
        if placing.have[j] == workers:
            return True
        rooms[node] = 0
    placing.release(j)
    for node, count in old.items():
        placing.take(j, node, count)
    return False
