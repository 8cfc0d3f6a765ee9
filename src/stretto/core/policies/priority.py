"""Priority with preemption."""

from __future__ import annotations

from stretto.core.listing import ListRule
from stretto.core.policy import NoOptions, Traits, list_policy


@list_policy("priority", traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"priority"})))
def priority(options: NoOptions) -> ListRule:
    """Higher priority first; a job stops running only for jobs of strictly higher priority.

    Among equals the running ones go first, then the earlier submitted; whatever fits runs, in that order.
    """
    return ListRule(key=lambda view: -view.priority.astype(float), preempts=True, running_first=True)
