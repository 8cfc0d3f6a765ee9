"""Tiresias: discretised two-dimensional least attained service (Gu et al., NSDI 2019)."""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from stretto.core.levels import Levels
from stretto.core.listing import ListRule
from stretto.core.options import Factor, Limits
from stretto.core.policy import Traits, list_policy


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queues: Limits = ()
    """Attained service at which each queue but the last ends, ascending. Empty: two queues split at one GPU-hour,
    or the three of the authors' simulator (3250, 7200) with `original`."""
    promote: Factor = 0.0
    """A job that has waited this many times as long as it has run starts over in the first queue; 0: never."""
    running_first: bool = True
    """Inside a queue, running jobs go before waiting ones; otherwise first come, first served alone."""
    service: Literal["gpu", "time"] = "gpu"
    """Count GPU-seconds, or seconds whatever the width."""
    original: bool = False
    """Do exactly as the authors' simulator does, so that its results can be reproduced to the digit."""


def limits(queues: tuple[float, ...], original: bool) -> tuple[float, ...]:
    """The limits asked for, or the default ones."""
    return queues or ((3250.0, 7200.0) if original else (3600.0,))


@list_policy("tiresias", traits=Traits(preempts="higher", work_conserving=True), options=Options)
@cache
def tiresias(options: Options) -> ListRule:
    """Preemptive; the less service a job has attained, the earlier its queue; first come, first served inside.

    A job enters the first queue; when its GPUs x time reach the queue's limit it goes to the tail of the next.
    Queues are walked in turn, in each the running jobs before the waiting ones, and what fits runs.
    Needs no lengths. With `promote`, waiting leads back to the first queue (the paper's PROMOTEKNOB).
    """
    return ListRule(
        preempts=True,
        levels=Levels(
            limits=limits(options.queues, options.original),
            counts=options.service,
            promote=options.promote,
            running_first=options.running_first,
            original=options.original,
        ),
    )
