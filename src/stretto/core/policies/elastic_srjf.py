"""Elastic shortest remaining job first: minimums by remaining time, the rest in turns."""

from __future__ import annotations

import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.listing import remaining
from stretto.core.policies.elastic_fifo import share_in_turns
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot


@policy(
    "elastic-srjf",
    traits=Traits(preempts="higher", work_conserving=True, elastic=True, uses=frozenset({"length", "curve"})),
)
def elastic_srjf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """In order of the time left at its minimum each job gets that minimum; then one more worker each in turns.

    As `elastic-fifo` in every other respect. Jobs of unknown length come last, in order of submission.
    """
    return share_in_turns(view, np.lexsort((view.job, remaining(view, view.min_workers))))
