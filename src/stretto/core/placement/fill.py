"""Fill one node, then the next: jobs in order of arrival, nodes in order of number.

What a first-come queue over a list of servers does. Nodes at the end of the list stay free the longest.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement.placing import Picks, Placing, one_by_one
from stretto.core.snapshot import IntArray, Snapshot


def place(view: Snapshot, workers: IntArray, pool: IntArray) -> IntArray:
    """[job, node] workers, on the first nodes that have room."""
    return one_by_one(view, workers, pool, first)


def first(placing: Placing, j: int, workers: int) -> Picks:
    """The first nodes with room, each filled before the next."""
    rooms = placing.rooms(j)
    node = int(np.argmax(rooms > 0)) if len(rooms) else -1
    if node >= 0 and rooms[node] >= workers:
        return [(node, workers)]
    nodes = np.flatnonzero(rooms)
    before = np.cumsum(rooms[nodes]) - rooms[nodes]
    nodes = nodes[before < workers]
    counts = np.minimum(rooms[nodes], workers - before[: len(nodes)])
    return list(zip(nodes.tolist(), counts.tolist(), strict=True))
