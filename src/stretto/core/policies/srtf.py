"""Shortest remaining time first."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule, decide
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(key=lambda view: view.remaining_s(view.requested), falls="time", preempts=True)


@policy(
    "srtf",
    traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"length"})),
    rule=lambda options: RULE,
)
def srtf(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Preemptive; key = seconds left at the requested size; runs every job that fits, in that order."""
    return decide(RULE, view)
