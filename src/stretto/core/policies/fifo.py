"""First in, first out, strictly."""

from __future__ import annotations

from stretto.core.listing import ListOptions, ListRule
from stretto.core.policy import Traits, list_policy


@list_policy("fifo", traits=Traits(preempts="never", starvation_free=True), options=ListOptions)
def fifo(options: ListOptions) -> ListRule:
    """Order of submission; the first job that does not fit holds up all behind it; never preempts.

    `original` changes nothing: Tiresias' `fifo` is the same.
    """
    return ListRule(admission="stop")
