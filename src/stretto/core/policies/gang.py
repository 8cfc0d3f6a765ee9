"""Gang scheduling as Kubernetes clusters have it today."""

from __future__ import annotations

import msgspec

from stretto.core.listing import ListRule
from stretto.core.policy import Traits, list_policy


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    skip: bool = True
    """Try the next gang when one does not fit, as Volcano and Kueue's BestEffortFIFO do; otherwise nobody passes the
    first that does not fit, as in Kueue's StrictFIFO."""


@list_policy("gang", traits=Traits(preempts="never"), options=Options)
def gang(options: Options) -> ListRule:
    """All requested workers of a job start together or none does; order of submission, never preempts or resizes.

    A gang that does not fit waits and holds nothing, so two half-started gangs cannot block each other. By default
    later gangs are tried (no reservation, so a wide one may starve): the order of `fit-first`. With `skip=false`
    it is that of `fifo`.
    """
    return ListRule(admission="skip" if options.skip else "stop")
