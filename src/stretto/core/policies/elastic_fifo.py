"""Elastic FIFO: everyone's minimum in order of submission, the rest in turns."""

from __future__ import annotations

import numpy as np

from stretto.core import handout
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import IntArray, Snapshot


@policy(
    "elastic-fifo",
    traits=Traits(
        preempts="higher", work_conserving=True, starvation_free=True, elastic=True, uses=frozenset({"curve"})
    ),
)
def elastic_fifo(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """In order of submission each job gets its minimum if that fits; then one more worker each in turns.

    Decided anew from an empty cluster every time, so running jobs shrink, down to their minimum, to let an earlier
    one in; a later one is stopped when it has no room beside the minimums before it. The turns end when nothing is
    free or all are at their useful maximum. A job without its minimum gets nothing.
    """
    return share_in_turns(view, np.arange(len(view)))


def share_in_turns(view: Snapshot, order: IntArray) -> Decision:
    """Minimums in this order, then the rest in turns."""
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    top = handout.useful(view)
    free = handout.give_minimums(view, order, workers, left, view.total_milli)
    handout.round_robin(view, order, workers, top, free)
    return handout.decision(view, workers, top, left)
