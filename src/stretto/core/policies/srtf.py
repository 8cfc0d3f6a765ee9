"""Shortest remaining time first."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListOptions, ListRule, decide
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import Snapshot


def rule(options: ListOptions) -> ListRule:
    return ListRule(falls="time", preempts=True, keeps_order=options.original)


@policy(
    "srtf",
    traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"length"})),
    options=ListOptions,
    rule=rule,
)
def srtf(view: Snapshot, memory: Memory, options: ListOptions) -> Decision:
    """Preemptive; key = seconds left at the requested size; runs every job that fits, in that order.

    With `original`, jobs with equally much left stay in the order of the last decision, newcomers behind,
    as in Tiresias' `shortest`; otherwise the earlier submitted goes first.
    """
    return decide(rule(options), view, memory)
