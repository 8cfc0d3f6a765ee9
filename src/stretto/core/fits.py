"""Whether so many workers per job can be placed at all: the question a policy may ask before it decides.

Where GPUs are only counted, that is a matter of capacity. Where nodes are known it is one of placement: moves are
allowed, so the answer is that of `fewest-moves`, which packs everything afresh when nothing less helps. A packing that
only a search through all of them would find counts as none.
"""

from __future__ import annotations

import numpy as np

from stretto.core.placement import fewest_moves
from stretto.core.snapshot import GPU, IntArray, Snapshot


def fits(view: Snapshot, workers: IntArray, pool: IntArray | None = None) -> bool:
    """Whether every job can have exactly these workers at once. Without `pool`: on its pool, or the first."""
    where = np.maximum(view.pool, 0) if pool is None else pool
    used = view.used_milli(workers, where)
    if len(used) > len(view.pools) or (used > view.capacity).any():
        return False
    if not len(view.nodes.name) or (view.reach is None and _only_counted(view, workers)):
        return True
    return bool((fewest_moves.place(view, workers, where).sum(axis=1) == workers).all())


def _only_counted(view: Snapshot, workers: IntArray) -> bool:
    """One whole GPU per worker and nothing else: then any free device will do."""
    runs = workers > 0
    plain = (view.width[runs] == GPU) & (view.fixed_milli[runs] == 0) & ~view.demand[runs].any(axis=1)
    return bool(plain.all())
