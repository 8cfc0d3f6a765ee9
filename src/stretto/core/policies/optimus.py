"""Optimus: the next GPU goes where it saves the most remaining time.

Peng et al., EuroSys 2018, with workers as the unit that is handed out. Two steps:

1. In order of submission every job gets its minimum; one that does not fit is passed over. So nobody waits while
   there is room for its minimum, and an older job never waits for a younger one.
2. While GPUs are free, the job with the largest gain L(n) - L(n + 1) gets a worker, where L(n) is the seconds it
   has left on n workers. Where the next worker alone gains nothing but several together do, the gain is that of
   the step with the best return per GPU, and the whole step is granted. It ends when nobody gains.

Long jobs gain most, so short ones stay narrow under load: that is Optimus' known weakness, kept as it is.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core import handout, marginal, rounds
from stretto.core.decision import Decision, Memory
from stretto.core.options import PeriodOrZero
from stretto.core.policy import Traits, policy
from stretto.core.snapshot import FloatArray, Snapshot

_FOR_EVER_S = 1e18


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    round_s: PeriodOrZero = 0.0
    """0: decide whenever something happens; otherwise only at multiples of so many seconds."""
    look_ahead: bool = True
    """Grant steps of several workers; without, as published, a job stops growing where one more gains nothing."""


@policy(
    "optimus",
    traits=Traits(
        work_conserving=True,
        preempts="higher",
        starvation_free=True,
        elastic=True,
        uses=frozenset({"length", "curve"}),
    ),
    options=Options,
)
def optimus(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Minimums in order of submission, then each worker to the job whose remaining time it shortens most."""
    if rounds.too_early(view, memory):
        return rounds.keep(view, memory)
    due_s = rounds.next_start(view.now_s, options.round_s)
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    free = handout.give_minimums(view, np.arange(len(view)), workers, left, view.total_milli)
    value = -seconds_left(view)
    last, _ = marginal.grow(view, value, workers, free, longest=None if options.look_ahead else 1)
    ahead = marginal.next_gain(view, value, workers)
    return marginal.decision(view, workers, left, last, ahead, memory=due_s, wake_s=due_s or math.inf)


def seconds_left(view: Snapshot) -> FloatArray:
    """L(n) for n = 0, 1, 2 …, one row per job."""
    speed = marginal.speeds(view)
    left_s = np.full(speed.shape, _FOR_EVER_S)
    np.divide(marginal.lengths(view)[:, None], speed, out=left_s, where=speed > 0)
    return left_s
