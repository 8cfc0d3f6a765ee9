"""First in, first out, but whatever fits may pass."""

from __future__ import annotations

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListOptions, ListRule, decide
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import Snapshot

RULE = ListRule()


@policy(
    "fit-first",
    traits=Traits(preempts="never", work_conserving=True),
    options=ListOptions,
    rule=lambda options: RULE,
)
def fit_first(view: Snapshot, memory: Memory, options: ListOptions) -> Decision:
    """Order of submission; a job that does not fit is passed over, without a reservation; never preempts.

    Wide jobs starve while narrow ones keep coming. `original` changes nothing: Tiresias' `fjf` is the same.
    """
    return decide(RULE, view)
