"""First in, first out, but whatever fits may pass."""

from __future__ import annotations

from stretto.core.listing import ListOptions, ListRule
from stretto.core.policy import Traits, list_policy


@list_policy("fit-first", traits=Traits(preempts="never", work_conserving=True), options=ListOptions)
def fit_first(options: ListOptions) -> ListRule:
    """Order of submission; a job that does not fit is passed over, without a reservation; never preempts.

    Wide jobs starve while narrow ones keep coming. `original` changes nothing: Tiresias' `fjf` is the same.
    """
    return ListRule()
