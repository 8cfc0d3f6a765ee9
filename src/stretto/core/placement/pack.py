"""Best fit decreasing: the fullest node first, so that wide workers still find whole nodes later.

Jobs with the widest workers first. A job goes whole to the node that holds it with the least of its GPUs free and
none of them stranded without CPU or memory (`Room.misfit`); where no node holds it, it fills the roomiest node and
goes on with the rest. Running workers are never moved.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement.placing import Picks, Placing, by_size
from stretto.core.snapshot import IntArray, Snapshot


def place(view: Snapshot, workers: IntArray, pool: IntArray) -> IntArray:
    """[job, node] workers, tightly packed."""
    placing = Placing(view, workers, pool)
    placing.settle(by_size(view, workers, pool), tightest)
    return placing.matrix()


def tightest(placing: Placing, j: int, workers: int) -> Picks:
    """The best fit that takes all; else the roomiest nodes whole, and the best fit for what is left."""
    return best_fit(placing, j, placing.rooms(j), workers)


def best_fit(placing: Placing, j: int, rooms: IntArray, workers: int) -> Picks:
    """The same with other room than there is."""
    picks: Picks = []
    while workers:
        most = int(rooms.max(initial=0))
        if most >= workers:
            misfit = placing.room.misfit(placing.shape[j], workers)
            node = int(np.where(rooms >= workers, misfit, np.inf).argmin())
            return [*picks, (node, workers)]
        if not most:
            break
        node = int(rooms.argmax())
        picks.append((node, most))
        rooms = rooms.copy() if len(picks) == 1 else rooms
        rooms[node] = 0
        workers -= most
    return picks
