"""A policy of your own in one file: jobs that ask for the most GPUs go first, small ones fill the gaps.

stretto sim run examples/two-jobs.csv --cluster 1x6 --policy examples/widest_first.py
"""

import msgspec
import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    spare_gpus: int = 0
    """GPUs that are never given out."""


@policy("widest-first", traits=Traits(preempts="higher"), options=Options)
def widest_first(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Order of width, the widest first; what fits runs; preempts for wider jobs."""
    free = view.total_milli - options.spare_gpus * GPU
    workers = np.zeros(len(view), np.int64)
    reason = np.full(len(view), Reason.NO_ROOM, np.int64)
    left = np.zeros(len(view))
    for j in np.lexsort((view.job, -view.need)).tolist():
        left[j] = max(free, 0) / GPU
        if view.need[j] <= free:
            free -= int(view.need[j])
            workers[j] = view.requested[j]
            reason[j] = Reason.RUNS
    return Decision.of(view, workers, reason, view.need / GPU, left)
