"""Shortest remaining job first: SRTF at the smallest size."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule, decide
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(falls="time", preempts=True, size="min")


@policy(
    "srjf",
    traits=Traits(preempts="higher", elastic=True, uses=frozenset({"length", "curve"})),
    rule=lambda options: RULE,
)
def srjf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Preemptive; key = seconds left on the job's minimum of workers; gives every job that fits exactly that.

    What is left over stays idle: `elastic-srjf` hands it out.
    """
    return decide(RULE, view)
