"""List policies: an order, walked once, each job admitted if it fits.

A list policy declares itself with a `ListRule`. `decide` derives the decision from the declaration for
any snapshot; the simulator runs the same declaration incrementally (`stretto.sim.listrun`), looking at
one waiting job per width only. Property tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, FloatArray, IntArray, Snapshot


class ListRule(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration. Ties are always broken by job number."""

    key: Callable[[Snapshot], FloatArray]
    """Smaller goes first, as of now."""
    falls: Literal["never", "time", "service"] = "never"
    """How the key of a *running* job changes: not, by 1 per second, or by its GPUs per second."""
    admission: Literal["stop", "skip"] = "skip"
    """At a job that does not fit: stop the walk, or skip the job."""
    preempts: bool = False
    """Running jobs are walked with the others, and stopped when they do not fit any more."""
    size: Literal["requested", "min"] = "requested"


def decide(rule: ListRule, view: Snapshot) -> Decision:
    """Walk the jobs in the declared order."""
    size = view.requested if rule.size == "requested" else view.min_workers
    need = size * view.width + view.fixed_milli
    order = np.lexsort((view.job, rule.key(view)))
    free = view.total_milli
    holds = np.zeros(len(view), np.bool_)
    if not rule.preempts:
        holds = view.workers > 0
        free -= int((view.workers * view.width + view.fixed_milli)[holds].sum())
        order = order[~holds[order]]
    workers = np.where(holds, view.workers, 0)
    reason = np.where(holds, np.int64(Reason.RUNS), np.int64(Reason.NO_ROOM))
    left = np.zeros(len(view))
    _walk(rule, order, need, free, size, workers, reason, left, view.workers)
    return Decision.of(view, workers, reason, need / GPU, left / GPU)


def _walk(
    rule: ListRule,
    order: IntArray,
    need: IntArray,
    free: int,
    size: IntArray,
    workers: IntArray,
    reason: IntArray,
    left: FloatArray,
    before: IntArray,
) -> None:
    widths = need[order].tolist()
    for position, (j, wide) in enumerate(zip(order.tolist(), widths, strict=True)):
        left[j] = free
        if wide <= free:
            free -= wide
            workers[j] = size[j]
            reason[j] = Reason.RUNS
        elif rule.admission == "stop":
            rest = order[position:]
            reason[rest] = Reason.BEHIND_HEAD
            left[rest] = free
            return
        elif before[j]:
            reason[j] = Reason.PREEMPTED
