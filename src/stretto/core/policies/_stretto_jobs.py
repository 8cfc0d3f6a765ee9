"""What the steps of the policy `stretto` tell each other about the jobs."""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core import marginal
from stretto.core.estimate import siblings
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot


class Jobs(msgspec.Struct, frozen=True, kw_only=True):
    """What is known or believed of every job. Times in seconds on its minimum of workers."""

    unit: FloatArray
    """Steps/s on the minimum."""
    done: FloatArray
    left: FloatArray
    need: IntArray
    """Milli-GPU at the minimum."""
    unknown: BoolArray | None
    """Whose `left` is a guess; None: nobody's."""


class Late(msgspec.Struct, frozen=True):
    """Who could no longer end in time, in comparison with equal sharing."""

    late: BoolArray
    behind: FloatArray
    """Expected completion time as a multiple of that under equal sharing."""
    share: FloatArray
    """Workers under equal sharing."""


def judge(view: Snapshot) -> tuple[Jobs, FloatArray]:
    """How long each job still needs; and what it will need in all, at least."""
    unit = np.maximum(view.rate(view.min_workers), 1e-12)
    done, left = view.done / unit, view.remaining / unit
    need = marginal.smallest_need(view)
    unknown = np.isnan(left)
    if not unknown.any():
        return Jobs(unit=unit, done=done, left=left, need=need, unknown=None), done + left
    seen = siblings.outlook(view, done)
    # Unless jobs must wait for each other, being careful costs nothing: expect the job to end any moment.
    crowded = int(need.sum()) > view.total_milli
    least = np.where(unknown, seen.least if crowded else done, done + left)
    return Jobs(unit=unit, done=done, left=np.where(unknown, seen.left, left), need=need, unknown=unknown), least


_STINT = 30.0


def stint_s(cost_s: FloatArray, quantum_s: float) -> FloatArray:
    """How long a job must have run before it is stopped for a late one, by what a stop costs it.

    Nothing where that is less than the quantum: such starts are nearly free.
    """
    return np.maximum(_STINT * cost_s - quantum_s, 0.0)


def stop_s(view: Snapshot) -> FloatArray:
    """What a stop costs each job: its next start, and the work it would do again."""
    return view.start_s if view.lost_s is None else view.start_s + view.lost_s


def places(job: IntArray, view: Snapshot) -> tuple[IntArray, BoolArray]:
    """Where the snapshot's jobs are in a remembered column of job numbers, and which of them are there at all."""
    if not len(job):
        return np.zeros(len(view), np.int64), np.zeros(len(view), np.bool_)
    at = np.minimum(np.searchsorted(job, view.job), len(job) - 1)
    return at, job[at] == view.job
