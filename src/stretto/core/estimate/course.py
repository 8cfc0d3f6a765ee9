"""How a job's speed-up changes over its life, learned from the jobs that were there before.

Some jobs do not keep their throughput curve: as training goes on, larger batches pay and more workers help. The
snapshot shows the curve of this moment alone. Whoever judges a job that is further on (here: in the fair world) asks
what came next: which row of the table of curves followed which, and at what share of the work it began. Jobs of
one kind share rows, so one of them teaches the rest. Only jobs of known length teach and are judged.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

_NEAR_THE_END = 0.9


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen so far. Columns by row of the table, then the jobs of the last snapshot."""

    follows: IntArray
    """The row that comes next; -1 while nobody was seen to go on."""
    begins: FloatArray
    """Share of the work done at which a row begins, as far as seen; 1 where unknown."""
    table: FloatArray
    job: IntArray
    curve: IntArray

    def fits(self, view: Snapshot) -> bool:
        """Whether rows mean the same in the snapshot's table."""
        return self.table is view.rates or np.array_equal(self.table, view.rates)

    @property
    def known(self) -> bool:
        """Whether any change was seen at all."""
        return bool((self.follows >= 0).any())


def empty(view: Snapshot) -> Course:
    """Nothing seen yet."""
    rows, none = view.rates.shape[1], np.empty(0, np.int64)
    return Course(follows=np.full(rows, -1), begins=np.ones(rows), table=view.rates, job=none, curve=none)


def watched(course: Course, view: Snapshot) -> Course:
    """What this snapshot adds. Rows of another table mean nothing: then it starts anew."""
    if not course.fits(view):
        course = empty(view)
    if view.rates.shape[1] < 2:
        return course
    now = {"job": view.job, "curve": view.curve}
    if not len(course.job):
        return msgspec.structs.replace(course, **now)
    at = np.minimum(np.searchsorted(course.job, view.job), len(course.job) - 1)
    before = course.curve[at]
    moves = (course.job[at] == view.job) & (before != view.curve)
    if not moves.any():
        return msgspec.structs.replace(course, **now)
    moved = np.flatnonzero(moves & np.isfinite(view.remaining))
    follows, begins = course.follows.copy(), course.begins.copy()
    share = view.done[moved] / np.maximum(view.done[moved] + view.remaining[moved], 1e-12)
    for old, new, done in zip(before[moved].tolist(), view.curve[moved].tolist(), share.tolist(), strict=True):
        begins[new] = min(begins[new], done)
        # Rows may have been skipped between two snapshots: the earliest successor is the nearest.
        if follows[old] < 0 or begins[new] < begins[follows[old]]:
            follows[old] = new
    return msgspec.structs.replace(course, follows=follows, begins=begins, **now)


def walk(
    course: Course, row: IntArray, share: FloatArray, speed: Callable[[IntArray], FloatArray], limit_s: float
) -> tuple[FloatArray, FloatArray]:
    """Let jobs go on from `share` of their work for at most `limit_s`: the seconds that takes, and the share then.

    `speed` gives the share of its work that each job does in a second while on the given rows.
    """
    spent_s, share = np.zeros(len(row)), share.copy()
    for _ in range(len(course.follows) + 1):
        pace = np.maximum(speed(row), 1e-100)
        following = course.follows[row]
        until = np.clip(np.where(following >= 0, course.begins[following], 1.0), share, 1.0)
        step_s = np.minimum((until - share) / pace, limit_s - spent_s)
        share, spent_s = share + step_s * pace, spent_s + step_s
        goes_on = (following >= 0) & (spent_s < limit_s) & (share < 1.0)
        if not goes_on.any():
            break
        row = np.where(goes_on, following, row)
    return spent_s, share


def unsure(course: Course, row: IntArray) -> BoolArray:
    """Whose curve changes, but nobody was seen to go on to the end from here."""
    changes = (course.follows[row] >= 0) | (course.begins[row] < 1.0)
    for _ in range(len(course.follows)):
        following = course.follows[row]
        if (following < 0).all():
            break
        row = np.where(following >= 0, following, row)
    end = np.where(course.begins[row] < 1.0, course.begins[row], 0.0)
    return changes & (end < _NEAR_THE_END)
