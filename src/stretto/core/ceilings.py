"""Nobody gets more workers than make it faster: what a job cannot use is another's.

Speeds may fall with more workers (`Snapshot.falls`). Policies are shown, for every job, a maximum no larger than the
smallest size within 3 % of the fastest one known, and rates that never fall below it. Of a job that is being measured
no size is known to be of use but those that were (`exploring`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core import exploring
from stretto.core.snapshot import FloatArray, IntArray, Snapshot

_NEARLY = 0.97
"""A size this close to the fastest is as good, and leaves more to others."""


def lowered(view: Snapshot) -> Snapshot:
    """The snapshot as policies see it; the same one where no speed falls and nobody explores."""
    if not len(view) or not (view.falls or view.explores is not None):
        return view
    most, rates = exploring.ceilings(view), view.rates
    if view.falls:
        best, rates = useful(view), np.maximum.accumulate(rates, axis=2)
        # Where sizes are explored, a job that is not takes what policies give.
        best = best if view.explores is None else np.where(view.explores, best, view.max_workers)
        most = np.minimum(most, best)
    # Whoever would lose its work by a resize stays as it is.
    most = np.where(view.pinned, np.maximum(view.max_workers, view.workers), most)
    return msgspec.structs.replace(
        view,
        falls=False,
        rates=rates,
        max_workers=most,
        requested=np.clip(view.requested, view.min_workers, most),
        workers=np.minimum(view.workers, most),
    )


def useful(view: Snapshot) -> IntArray:
    """The smallest size of each job, between its limits, that is as fast as it can be."""
    speed = _speeds(view)
    sizes = np.arange(speed.shape[1])
    possible = (sizes >= view.min_workers[:, None]) & (sizes <= view.max_workers[:, None])
    speed = np.where(possible, speed, -1.0)
    fastest = speed.max(axis=1, keepdims=True)
    first: IntArray = np.argmax(speed >= _NEARLY * fastest, axis=1)
    # Beyond the table nothing changes any more; without any speed there is nothing to choose by.
    known = (fastest[:, 0] > 0) & (view.min_workers < speed.shape[1])
    return np.where(known & ~view.is_service, np.maximum(first, view.min_workers), view.max_workers)


def _speeds(view: Snapshot) -> FloatArray:
    """[job, workers] steps/s on the pool that each job is on; for those that wait, on the one where it is fastest."""
    if len(view.pools) == 1:
        speed: FloatArray = view.rates[0, view.curve]
        return speed
    every = view.rates[:, view.curve]
    best = every.max(axis=2).argmax(axis=0)
    chosen: FloatArray = every[np.where(view.pool >= 0, view.pool, best), np.arange(len(view))]
    return chosen
