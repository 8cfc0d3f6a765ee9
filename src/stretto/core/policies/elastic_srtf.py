"""Elastic shortest remaining time first: the shortest job runs as fast as it can."""

from __future__ import annotations

import numpy as np

from stretto.core import handout
from stretto.core.decision import Decision, Memory
from stretto.core.listing import remaining
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot


@policy(
    "elastic-srtf",
    traits=Traits(preempts="higher", work_conserving=True, elastic=True, uses=frozenset({"length", "curve"})),
)
def elastic_srtf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Minimums by the time left at the minimum; the rest in the same order, to each job as much as it can use.

    Good for the shortest job; with curves that flatten, workers it hardly gains from are missing elsewhere.
    Jobs of unknown length come last, in order of submission.
    """
    order = np.lexsort((view.job, remaining(view, view.min_workers)))
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    top = handout.useful(view)
    free = handout.give_minimums(view, order, workers, left, view.total_milli)
    handout.fill_in_order(view, order, workers, top, free)
    return handout.decision(view, workers, top, left, between=Reason.RUNS)
