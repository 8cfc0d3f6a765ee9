"""Elastic Tiresias: least attained service decides who runs, marginal speed-up who grows (Wu et al., EDL)."""

from __future__ import annotations

from functools import cache
from typing import Annotated

import msgspec
import numpy as np

from stretto.core import handout, levels, marginal
from stretto.core.decision import Decision
from stretto.core.levels import Arranged, Kept, Levels
from stretto.core.listing import walk
from stretto.core.options import Factor, Limits
from stretto.core.policies.tiresias import limits
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, FloatArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queues: Limits = ()
    """GPU-seconds at which each queue but the last ends, ascending. Empty: two queues split at one GPU-hour."""
    promote: Factor = 0.0
    """A job that has waited this many times as long as it has run starts over in the first queue; 0: never."""
    pending: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 10
    """With more jobs than this waiting, those below the first queue shrink to their minimum."""


@policy(
    "elastic-tiresias",
    traits=Traits(preempts="any", work_conserving=True, elastic=True, uses=frozenset({"curve"})),
    options=Options,
)
def elastic_tiresias(view: Snapshot, memory: Kept | None, options: Options) -> Decision:
    """Requested sizes in the order of Tiresias' queues, then the rest to the largest marginal speed-up.

    1. The jobs are walked as by `tiresias`: each gets its requested size (within its useful range) if that fits.
    2. Compaction: with more than `pending` jobs left out, running jobs below the first queue shrink to their minimum.
    3. What is free goes, again and again, to the largest gain in speed-up per GPU: S(n+1) - S(n) for a running job
       (or the steepest longer step where the curve is level), S(m)/m for one left out, which then gets its minimum m
       at once. Ties go by the order of 1. It ends when no gain is positive or nothing fits.
    Needs no lengths.
    """
    rule = _levels(options)
    held = np.where(view.workers > 0, view.workers, view.min_workers)
    arranged = levels.arrange(rule, view, memory, held)
    top = handout.useful(view)
    workers, left = _walk(view, arranged.order, top)
    if int((workers == 0).sum()) > options.pending:
        workers = np.where((workers > 0) & (arranged.level > 0), view.min_workers, workers)
    free = view.total_milli - int(np.where(workers > 0, workers * view.width + view.fixed_milli, 0).sum())
    value = handout.speedups(view)
    last, free = handout.spend_by_gain(view, value, arranged.order, workers, top, free)
    ahead = marginal.next_gain(view, value, workers)
    rate = workers * view.width / GPU
    wake_s = levels.next_change_s(rule, view, msgspec.structs.replace(arranged, rate=rate), workers > 0)
    decision = marginal.decision(view, workers, left, last, ahead, memory=arranged.kept, wake_s=wake_s)
    return _in_queues(view, decision, arranged, free)


@cache
def _levels(options: Options) -> Levels:
    return Levels(limits=limits(options.queues, original=False), promote=options.promote)


def _walk(view: Snapshot, order: IntArray, top: IntArray) -> tuple[IntArray, FloatArray]:
    """Requested sizes in this order, first fit; and what was free at each job's turn."""
    size = np.clip(view.requested, view.min_workers, top)
    need = size * view.width + view.fixed_milli
    fits, free = walk(need[order].tolist(), view.total_milli, len(order))
    runs, left = np.empty(len(view), np.bool_), np.empty(len(view))
    runs[order], left[order] = fits, free
    return np.where(runs, size, 0), left


def _in_queues(view: Snapshot, decision: Decision, arranged: Arranged, free: int) -> Decision:
    """Name the queue of those that wait in a lower one."""
    lower = (decision.reason == Reason.NO_ROOM) & (arranged.level > 0)
    reason = np.where(lower, np.int64(Reason.LOWER_QUEUE), decision.reason)
    numbers = np.stack((arranged.level, np.full(len(view), free / GPU)), axis=1)
    return msgspec.structs.replace(decision, reason=reason, detail=np.where(lower[:, None], numbers, decision.detail))
