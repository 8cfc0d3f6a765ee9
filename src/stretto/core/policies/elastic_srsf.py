"""Elastic shortest remaining service first: GPU-seconds go where they buy most."""

from __future__ import annotations

import numpy as np

from stretto.core import handout, marginal
from stretto.core.decision import Decision, Memory
from stretto.core.listing import remaining
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot


@policy(
    "elastic-srsf",
    traits=Traits(preempts="higher", work_conserving=True, elastic=True, uses=frozenset({"length", "curve"})),
)
def elastic_srsf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Minimums by the GPU-seconds left at the minimum; the rest by speed-up, to whoever gains most per GPU.

    Speed-up is throughput over that of one worker (`handout.speedups`). A job's order counts for its minimum only.
    Jobs of unknown length come last, in order of submission.
    """
    order = np.lexsort((view.job, remaining(view, view.min_workers, service=True)))
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    free = handout.give_minimums(view, order, workers, left, view.total_milli)
    value = handout.speedups(view)
    last, _ = marginal.grow(view, value, workers, free)
    return marginal.decision(view, workers, left, last, marginal.next_gain(view, value, workers))
