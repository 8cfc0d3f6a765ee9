"""Smallest job first: by GPUs, not by time."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListOptions, ListRule, decide
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(key=lambda view: view.need.astype(float), preempts=True)


@policy(
    "sjf",
    traits=Traits(preempts="higher", work_conserving=True),
    options=ListOptions,
    rule=lambda options: RULE,
)
def sjf(view: Snapshot, memory: Memory, options: ListOptions) -> Decision:
    """Preemptive; key = GPUs requested; runs every job that fits, in that order.

    `original` changes nothing: Tiresias' `sjf` keeps the list's order among equals, which is that of submission.
    """
    return decide(RULE, view)
