"""Priority with preemption."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule, decide
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule(key=lambda view: -view.priority.astype(float), preempts=True, running_first=True)


@policy(
    "priority",
    traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"priority"})),
    rule=lambda options: RULE,
)
def priority(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Higher priority first; a job stops running only for jobs of strictly higher priority.

    Among equals the running ones go first, then the earlier submitted; whatever fits runs, in that order.
    """
    return decide(RULE, view)
