"""Spread the load over the nodes: jobs in order of arrival, each on the node with the most room.

On equal nodes that is a round robin over servers. A job stays together where one node holds it; a larger one is
dealt out worker by worker, always to the node with the most room left.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement.placing import Picks, Placing, one_by_one
from stretto.core.snapshot import IntArray, Snapshot


def place(view: Snapshot, workers: IntArray, pool: IntArray) -> IntArray:
    """[job, node] workers, evenly spread."""
    return one_by_one(view, workers, pool, roomiest)


def roomiest(placing: Placing, j: int, workers: int) -> Picks:
    """All on the node with the most room, or dealt out one by one."""
    rooms = placing.rooms(j)
    node = int(np.argmax(rooms)) if len(rooms) else -1
    if node >= 0 and rooms[node] >= workers:
        return [(node, workers)]
    left = rooms.copy()
    for _ in range(min(workers, int(rooms.sum()))):
        left[np.argmax(left)] -= 1
    nodes = np.flatnonzero(rooms - left)
    return list(zip(nodes.tolist(), (rooms - left)[nodes].tolist(), strict=True))
