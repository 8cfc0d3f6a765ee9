"""Shortest remaining job first: SRTF at the smallest size."""

from __future__ import annotations

from stretto.core.listing import ListRule
from stretto.core.policy import NoOptions, Traits, list_policy


@list_policy("srjf", traits=Traits(preempts="higher", elastic=True, uses=frozenset({"length", "curve"})))
def srjf(options: NoOptions) -> ListRule:
    """Preemptive; key = seconds left on the job's minimum of workers; gives every job that fits exactly that.

    What is left over stays idle: `elastic-srjf` hands it out.
    """
    return ListRule(falls="time", preempts=True, size="min")
