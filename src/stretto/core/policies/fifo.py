"""First in, first out, strictly."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule, decide
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(key=lambda view: view.submit_s, admission="stop")


@policy("fifo", traits=Traits(preempts="never", starvation_free=True), rule=lambda options: RULE)
def fifo(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Order of submission; the first job that does not fit holds up all behind it; never preempts."""
    return decide(RULE, view)
