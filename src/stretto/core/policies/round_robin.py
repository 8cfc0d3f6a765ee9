"""Round robin: time slices in turn."""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.listing import walk
from stretto.core.options import Period
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    quantum_s: Period = 60.0
    """Length of a time slice. Give at least ten times what a restart costs, or restarts eat the cluster: the default
    suits restarts of up to 6 s."""
    admission: Literal["skip", "stop"] = "skip"
    """At a job that does not fit: try the next ones, or end the round there."""


class Kept(msgspec.Struct, frozen=True):
    """The cyclic list, by job number, head first; and when the current slice ends."""

    queue: IntArray
    until_s: float


@policy("round-robin", traits=Traits(preempts="any", starvation_free=True), options=Options)
def round_robin(view: Snapshot, memory: Kept | None, options: Options) -> Decision:
    """Requested sizes, in slices of `quantum_s`: who had a turn goes to the back of the list.

    Newcomers join at the tail. At the end of a slice the jobs that ran go to the tail, in their order, and the list is
    walked from its head: whatever fits runs. So the first job that was left out comes first next time, and each
    job's turn comes within as many slices as there were jobs ahead of it. During a slice nobody is stopped; room
    that gets free goes to the waiting jobs in list order. While all fit there are no slices.
    """
    order, until_s = _listed(view, memory)
    running = view.workers > 0
    goes_first = ~running if view.now_s >= until_s else running
    order = np.concatenate((order[goes_first[order]], order[~goes_first[order]]))
    holds = goes_first & running
    runs, left = _admit(view, order, options, holds)
    waits = ~runs & (view.need <= view.total_milli)
    if not waits.any():
        until_s = math.inf
    elif not view.now_s < until_s < math.inf:
        until_s = view.now_s + options.quantum_s
    return _decision(view, order, runs, left, Kept(view.job[order], until_s))


def _listed(view: Snapshot, memory: Kept | None) -> tuple[IntArray, float]:
    """The active jobs in list order, newcomers at the tail; and when the slice ends."""
    if memory is None:
        return np.arange(len(view)), math.inf
    known = memory.queue[np.isin(memory.queue, view.job)]
    old = np.searchsorted(view.job, known)
    new = np.setdiff1d(np.arange(len(view)), old)
    return np.concatenate((old, new)), memory.until_s


def _admit(view: Snapshot, order: IntArray, options: Options, holds: BoolArray) -> tuple[BoolArray, IntArray]:
    """Who runs, and what was free at each one's turn. Those that hold a slice stand first in the order."""
    fitting = order[view.need[order] <= view.total_milli]
    strict_from = int(holds[fitting].sum()) if options.admission == "stop" else len(fitting)
    fits, free = walk(view.need[fitting].tolist(), view.total_milli, strict_from)
    runs, left = np.zeros(len(view), np.bool_), np.zeros(len(view), np.int64)
    runs[fitting], left[fitting] = fits, free
    return runs, left


def _decision(view: Snapshot, order: IntArray, runs: BoolArray, left: IntArray, kept: Kept) -> Decision:
    never = view.need > view.total_milli
    reason = np.where(runs, np.int64(Reason.RUNS), np.int64(Reason.WAITS_FOR_TURN))
    reason[never] = Reason.TOO_LARGE
    ahead = np.zeros(len(view))
    ahead[order] = np.cumsum(~runs[order] & ~never[order]) - 1
    first = np.where(runs | never, view.need / GPU, ahead)
    second = np.where(never, view.total_milli, left) / GPU
    workers = np.where(runs, view.asked, 0)
    return Decision.of(view, workers, reason, first, second, memory=kept, wake_s=kept.until_s)
