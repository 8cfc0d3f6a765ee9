"""The fair world, kept beside the real one: every job holds an equal share of the cluster, for free.

It says how far each job would be under equal sharing, and so who is being slowed down. Jobs that ended in reality
live on here until they would have ended; jobs that ended here stay until they end in reality. Progress is counted in
steps. A share is capped at the job's maximum; below its minimum speed is linear. A job whose speed-up changes with
its progress is further on here than in reality, or less far: what comes then is learned from others (`course`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from stretto.core.estimate import course as courses
from stretto.core.estimate.course import Course
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot


class FairWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Columns by job number, ascending."""

    at_s: float
    course: Course
    job: IntArray
    submit_s: FloatArray
    progress: FloatArray
    speed: FloatArray
    share: FloatArray
    """Workers, as a fraction."""
    size: FloatArray
    """In all; nan while nobody knows."""
    ended_s: FloatArray
    """When the job ended here; inf before."""
    done: FloatArray
    """Real progress at `at_s`."""
    pace: FloatArray
    """Real speed since then; with `done` it tells the size of a job that has left."""
    curve: IntArray
    """Row of the table at its progress here; -1 for a job that has left, once that table is gone: its speed is
    linear from there on."""
    low: IntArray
    high: IntArray
    width: IntArray
    here: BoolArray
    """Whether the job is still active in reality."""
    past: FloatArray
    """Progress at the ages of `_AGES_S`, inf where that is still to come; no columns while all sizes are known."""


_COLUMNS = (
    "job", "submit_s", "progress", "speed", "share", "size", "ended_s", "done", "pace", "curve", "low", "high", "width",
    "here", "past",
)  # fmt: skip

_AGES_S = 20.0 * 1.15 ** np.arange(85)
"""From 20 seconds to a month."""


def empty(view: Snapshot) -> FairWorld:
    """No job yet."""
    floats, ints = np.empty(0), np.empty(0, np.int64)
    return FairWorld(
        at_s=view.now_s, course=courses.empty(view), job=ints, submit_s=floats, progress=floats, speed=floats,
        share=floats, size=floats, ended_s=floats, done=floats, pace=floats, curve=ints, low=ints, high=ints,
        width=ints, here=np.empty(0, np.bool_), past=np.empty((0, 0)),
    )  # fmt: skip


def advance(world: FairWorld, view: Snapshot, course: Course, size: FloatArray) -> FairWorld:
    """The fair world at the snapshot's time, with its new jobs in and its finished ones out.

    `size` is what the snapshot's jobs need in all, in steps (nan where unknown).
    """
    passed_s = view.now_s - world.at_s
    progress = _progress(world, passed_s)
    place = np.searchsorted(view.job, world.job)
    here = np.zeros(len(world.job), np.bool_)
    inside = place < len(view)
    here[inside] = view.job[place[inside]] == world.job[inside]
    left = ~here & world.here
    total = np.where(left & np.isnan(world.size), world.done + world.pace * passed_s, world.size)
    total[here] = size[place[here]]
    ends = (progress >= total) & np.isinf(world.ended_s)
    over = np.where(ends, progress - total, 0.0) / np.maximum(world.speed, 1e-12)
    ended = np.where(ends, np.maximum(view.now_s - over, world.at_s), world.ended_s)
    columns: dict[str, Any] = {
        "progress": np.where(ends, total, progress), "size": total, "ended_s": ended, "here": here,
        "done": np.where(here, view.done[np.minimum(place, len(view) - 1)], world.done) if len(view) else world.done,
        "curve": _curves(world, view, here, place[here]),
        "past": _past(world, passed_s) if np.isnan(size).any() else world.past,
    }  # fmt: skip
    world = msgspec.structs.replace(world, at_s=view.now_s, course=course, **columns)
    world = _pick(world, here | np.isinf(ended))
    known = world.job
    world = _shares(_further(_join(world, view, size)), view)
    if len(world.job) == len(known):
        return world
    # What the newcomers have done here since they were submitted.
    at = positions(world, view)
    fresh = np.zeros(len(world.job))
    fresh[at] = np.where(np.isin(view.job, known), 0.0, view.now_s - view.submit_s)
    return msgspec.structs.replace(world, progress=world.progress + fresh * world.speed)


def positions(world: FairWorld, view: Snapshot) -> IntArray:
    """Where the snapshot's jobs are in the world's columns."""
    return np.searchsorted(world.job, view.job)


def paced(world: FairWorld, view: Snapshot, pace: FloatArray) -> FairWorld:
    """Note the real speeds that hold from now on."""
    speed = np.zeros(len(world.job))
    speed[positions(world, view)] = pace
    return msgspec.structs.replace(world, pace=speed)


def age_at(world: FairWorld, view: Snapshot, progress: FloatArray) -> FloatArray:
    """How old each of the snapshot's jobs was, or will be, when it had that much progress here, in seconds."""
    at = positions(world, view)
    age_s, done = view.now_s - world.submit_s[at], world.progress[at]
    left_s = (progress - done) / np.maximum(world.speed[at], 1e-12)
    if world.course.known:
        left_s = np.where(np.isnan(world.size[at]), left_s, _left_s(world)[at])
    ended_s = world.ended_s[at]
    age_s = np.where(progress > done, age_s + left_s, _age_in_past(world.past[at], done, age_s, progress))
    return np.where(np.isfinite(ended_s), ended_s - view.submit_s, age_s)


def _age_in_past(past: FloatArray, done: FloatArray, age_s: FloatArray, progress: FloatArray) -> FloatArray:
    """Between the two ages of the table around `progress`, or the last of them and now."""
    if not past.shape[1]:
        return age_s
    after = (past < progress[:, None]).sum(axis=1)
    row, column = np.arange(len(after)), np.minimum(after, past.shape[1] - 1)
    before = np.maximum(after - 1, 0)
    low, low_s = np.where(after > 0, past[row, before], 0.0), np.where(after > 0, _AGES_S[before], 0.0)
    filled = (after < past.shape[1]) & np.isfinite(past[row, column])
    high, high_s = np.where(filled, past[row, column], done), np.where(filled, _AGES_S[column], age_s)
    part = np.where(high > low, (progress - low) / np.maximum(high - low, 1e-12), 1.0)
    between_s: FloatArray = low_s + (high_s - low_s) * np.clip(part, 0.0, 1.0)
    return between_s


def _past(world: FairWorld, passed_s: float) -> FloatArray:
    """The table of progress, with the ages that were reached since the last look."""
    past = world.past if world.past.shape[1] else np.full((len(world.job), len(_AGES_S)), np.inf)
    age_s = world.at_s - world.submit_s
    after = np.searchsorted(_AGES_S, age_s, "right")
    following_s = np.append(_AGES_S, np.inf)[after] - age_s
    row = np.flatnonzero((following_s <= passed_s) & np.isinf(world.ended_s))
    if not len(row):
        return past
    since_s = _AGES_S - age_s[row, None]
    reached = (since_s > 0) & (since_s <= passed_s)
    filled = past.copy()
    filled[row] = np.where(reached, world.progress[row, None] + world.speed[row, None] * since_s, past[row])
    return filled


def _progress(world: FairWorld, passed_s: float) -> FloatArray:
    progress: FloatArray = world.progress + world.speed * passed_s
    if not world.course.known or not len(world.job):
        return progress
    _, share = courses.walk(world.course, np.maximum(world.curve, 0), *_on_course(world), passed_s)
    steady = np.isnan(world.size) | (world.curve < 0) | (world.speed <= 0)
    return np.where(steady | (share >= 1.0), progress, share * world.size)


def _left_s(world: FairWorld) -> FloatArray:
    """Seconds to the end at the present share."""
    return courses.walk(world.course, np.maximum(world.curve, 0), *_on_course(world), np.inf)[0]


def _on_course(world: FairWorld) -> tuple[FloatArray, Callable[[IntArray], FloatArray]]:
    """How far each job is, and its speed by row, both as shares of its size."""
    size = np.maximum(np.where(np.isnan(world.size), 1.0, world.size), 1e-12)

    def speed(row: IntArray) -> FloatArray:
        return np.where(world.curve < 0, world.speed, speed_on(world.course.table, row, world.share, world.low)) / size

    return np.clip(world.progress / size, 0.0, 1.0), speed


def speed_on(table: FloatArray, row: IntArray, share: FloatArray, low: IntArray) -> FloatArray:
    """Steps/s on a share of workers: linear between whole numbers, and below the minimum."""
    rates, top = table[0], table.shape[2] - 1
    whole = np.minimum(share.astype(np.int64), top)
    slow, fast = rates[row, whole], rates[row, np.minimum(whole + 1, top)]
    least = rates[row, np.minimum(low, top)]
    speed: FloatArray = np.where(share < low, share / low * least, slow + (fast - slow) * (share - whole))
    return speed


def _further(world: FairWorld) -> FairWorld:
    """Jobs that are further on here than in reality, on the rows that come there."""
    if not world.course.known:
        return world
    follows, begins = world.course.follows, world.course.begins
    share = world.progress / np.maximum(world.size, 1e-12)
    row = world.curve
    for _ in range(len(follows)):
        following = np.where(row >= 0, follows[row], -1)
        goes_on = (following >= 0) & (share >= begins[following])
        if not goes_on.any():
            break
        row = np.where(goes_on, following, row)
    return msgspec.structs.replace(world, curve=row)


def _curves(world: FairWorld, view: Snapshot, here: BoolArray, place: IntArray) -> IntArray:
    """Rows of the snapshot's table; where it is another one, nobody knows those of jobs that have left."""
    curve = world.curve.copy() if world.course.fits(view) else np.full(len(world.job), -1)
    curve[here] = view.curve[place]
    return curve


def _pick(world: FairWorld, keep: BoolArray) -> FairWorld:
    if keep.all():
        return world
    return msgspec.structs.replace(world, **{name: getattr(world, name)[keep] for name in _COLUMNS})


def _join(world: FairWorld, view: Snapshot, size: FloatArray) -> FairWorld:
    place = np.searchsorted(world.job, view.job)
    known = np.zeros(len(view), np.bool_)
    inside = place < len(world.job)
    known[inside] = world.job[place[inside]] == view.job[inside]
    new = ~known
    count = int(new.sum())
    if not count:
        return world
    zero = np.zeros(count)
    fresh: dict[str, Any] = {
        "job": view.job[new], "submit_s": view.submit_s[new], "progress": zero, "speed": zero, "share": zero,
        "size": size[new], "ended_s": np.full(count, np.inf), "done": zero, "pace": zero, "curve": view.curve[new],
        "low": view.min_workers[new], "high": view.max_workers[new], "width": np.maximum(view.width[new], 1),
        "here": np.ones(count, np.bool_), "past": np.full((count, world.past.shape[1]), np.inf),
    }  # fmt: skip
    if len(world.job) and view.job[new][0] < world.job[-1]:
        order = np.argsort(np.concatenate((world.job, fresh["job"])), kind="stable")
        merged = {name: np.concatenate((getattr(world, name), fresh[name]))[order] for name in _COLUMNS}
    else:
        merged = {name: np.concatenate((getattr(world, name), fresh[name])) for name in _COLUMNS}
    return msgspec.structs.replace(world, **merged)


def _shares(world: FairWorld, view: Snapshot) -> FairWorld:
    """Equal shares of the capacity, capped, for the jobs that have not ended here, and the speeds they give."""
    active = np.isinf(world.ended_s)
    cap = np.where(active, world.high * world.width, 0).astype(np.float64)
    share = np.minimum(cap, _level(cap[active], view.total_milli)) / world.width
    speed = speed_on(view.rates, world.curve, share, world.low)
    lost = world.curve < 0
    if lost.any():
        held = lost & (world.share > 0)
        linear = np.where(held, world.speed / np.where(held, world.share, 1.0), 0.0)
        speed = np.where(lost, linear * share, speed)
    return msgspec.structs.replace(world, share=share, speed=speed)


def _level(cap: FloatArray, capacity: int) -> float:
    """The share c with sum(min(cap, c)) = capacity; unlimited when everybody fits."""
    if float(cap.sum()) <= capacity:
        return np.inf
    cap = np.sort(cap)
    filled = np.concatenate(((0.0,), np.cumsum(cap)[:-1]))
    level = (capacity - filled) / np.arange(len(cap), 0, -1)
    return float(level[int(np.argmax(level <= cap))])
