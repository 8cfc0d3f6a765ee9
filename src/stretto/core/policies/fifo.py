"""First in, first out, strictly."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListOptions, ListRule, decide
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(admission="stop")


@policy("fifo", traits=Traits(preempts="never", starvation_free=True), options=ListOptions, rule=lambda options: RULE)
def fifo(view: Snapshot, memory: Memory, options: ListOptions) -> Decision:
    """Order of submission; the first job that does not fit holds up all behind it; never preempts.

    `original` changes nothing: Tiresias' `fifo` is the same.
    """
    return decide(RULE, view)
