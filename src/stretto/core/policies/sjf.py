"""Smallest job first: by GPUs, not by time."""

from __future__ import annotations

from stretto.core.listing import ListOptions, ListRule
from stretto.core.policy import Traits, list_policy


@list_policy("sjf", traits=Traits(preempts="higher", work_conserving=True), options=ListOptions)
def sjf(options: ListOptions) -> ListRule:
    """Preemptive; key = GPUs requested; runs every job that fits, in that order.

    `original` changes nothing: Tiresias' `sjf` keeps the list's order among equals, which is that of submission.
    """
    return ListRule(key=lambda view: view.need.astype(float), preempts=True)
