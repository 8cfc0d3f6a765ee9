"""Shortest remaining time first."""

from __future__ import annotations

from stretto.core.listing import ListOptions, ListRule
from stretto.core.policy import Traits, list_policy


@list_policy(
    "srtf",
    traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"length"})),
    options=ListOptions,
)
def srtf(options: ListOptions) -> ListRule:
    """Preemptive; key = seconds left at the requested size; runs every job that fits, in that order.

    With `original`, jobs with equally much left stay in the order of the last decision, newcomers behind,
    as in Tiresias' `shortest`; otherwise the earlier submitted goes first.
    """
    return ListRule(falls="time", preempts=True, keeps_order=options.original)
