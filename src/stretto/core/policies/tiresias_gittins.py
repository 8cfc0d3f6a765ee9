"""Tiresias with the two-dimensional Gittins index (Gu et al., NSDI 2019)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from itertools import accumulate
from typing import Annotated

import msgspec

from stretto.core.levels import Levels
from stretto.core.listing import ListRule
from stretto.core.options import Amount, Factor, Limits
from stretto.core.policies._gittins_sample import GPU_S
from stretto.core.policies.tiresias import limits
from stretto.core.policy import Traits, list_policy


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queues: Limits = ()
    """Attained GPU-seconds at which each queue but the last ends, ascending; defaults as for `tiresias`."""
    quantum: Annotated[float, msgspec.Meta(ge=0, le=1e12)] = 0.0
    """GPU-seconds that the index looks ahead. 0: to the upper limit of the queue, in the last queue to the end;
    with `original`, 3250 in all."""
    promote: Factor = 0.0
    """A job that has waited this many times as long as it has run starts over in the first queue; 0: never."""
    sample: tuple[Amount, ...] = ()
    """GPU-seconds of earlier jobs. Empty: the 1,001 that come with Tiresias' simulator."""
    original: bool = False
    """Do exactly as the authors' simulator does, so that its results can be reproduced to the digit."""


@list_policy("tiresias-gittins", traits=Traits(preempts="higher", work_conserving=True), options=Options)
@cache
def tiresias_gittins(options: Options) -> ListRule:
    """Preemptive; the queues of `tiresias`, but inside a queue the larger Gittins index goes first.

    The index of a job that has attained a is P(ends within the next D) / E(service it takes of these D), over the
    sample's jobs larger than a; 0 beyond the largest. D is the `quantum`. Ties go to the earlier submitted.
    Indices are looked up whenever something happens, not in between.
    """
    sample = tuple(sorted(options.sample)) or GPU_S
    ends = limits(options.queues, options.original)
    if options.original:
        index = original_index(sample, options.quantum or 3250.0)
    else:
        quanta = tuple(options.quantum or end for end in (*ends, math.inf))
        index = gittins_index(sample, quanta)
    return ListRule(
        preempts=True,
        levels=Levels(limits=ends, promote=options.promote, index=index, original=options.original),
    )


def gittins_index(sample: tuple[float, ...], quanta: tuple[float, ...]) -> Callable[[float, int], float]:
    """The index by attained service and queue, for a sorted sample and one quantum per queue."""
    sums = (0.0, *accumulate(sample))
    n = len(sample)

    def index(served: float, level: int) -> float:
        low = bisect_right(sample, served)
        if low == n:
            return 0.0
        ahead = quanta[level]
        high = bisect_right(sample, served + ahead)
        beyond = ahead * (n - high) if high < n else 0.0
        taken = sums[high] - sums[low] - served * (high - low) + beyond
        return (high - low) / taken if taken > 0 else math.inf

    return index


def original_index(sample: tuple[float, ...], quantum: float) -> Callable[[float, int], float]:
    """The index as the authors' code computes it.

    It is tabulated just below each sample value; the expected service counts whole sizes instead of what is left of
    them, divided without remainder; the largest size never counts as ending; probabilities are rounded to 5 digits
    and indices, in millionths, to 4.
    """
    n, sums = len(sample), (0.0, *accumulate(sample))
    table = []
    for size in sample:
        low = bisect_right(sample, size - 1)
        far = size - 1 + quantum
        high = n - 1 if far > sample[-1] - 1 else bisect_right(sample, far)
        chance = _rounded((high - low) / (n - low), 5)
        expected = max(1.0, (sums[high] - sums[low] + quantum * (n - high)) // (n - low))
        table.append(_rounded(chance * 1_000_000 / expected, 4))

    def index(served: float, level: int) -> float:
        low = bisect_right(sample, served)
        return table[low] if low < n else 0.0

    return index


def _rounded(value: float, digits: int) -> float:
    """Halves away from zero, as the authors' Python 2 does."""
    return float(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
