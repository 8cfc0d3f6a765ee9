"""The fair world, kept beside the real one: every job holds an equal share of the cluster, for free.

It says how far each job would be under equal sharing, and so who is being slowed down. Jobs that ended in reality
live on here until they would have ended; jobs that ended here stay until they end in reality. Progress is counted in
seconds on the job's minimum of workers. A share is capped at the job's maximum; below its minimum speed is linear.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot


class FairWorld(msgspec.Struct, frozen=True, kw_only=True):
    """Columns by job number, ascending."""

    at_s: float
    table: FloatArray
    """The throughputs that `curve` points into."""
    job: IntArray
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
    """-1 for a job that has left, once the table it pointed into is gone: its speed is linear from there on."""
    low: IntArray
    high: IntArray
    width: IntArray
    here: BoolArray
    """Whether the job is still active in reality."""


_COLUMNS = (
    "job", "progress", "speed", "share", "size", "ended_s", "done", "pace", "curve", "low", "high", "width", "here",
)  # fmt: skip


def empty(at_s: float) -> FairWorld:
    """No job yet."""
    floats, ints = np.empty(0), np.empty(0, np.int64)
    return FairWorld(
        at_s=at_s, table=floats, job=ints, progress=floats, speed=floats, share=floats, size=floats, ended_s=floats,
        done=floats, pace=floats, curve=ints, low=ints, high=ints, width=ints, here=np.empty(0, np.bool_),
    )  # fmt: skip


def advance(world: FairWorld, view: Snapshot, done: FloatArray, size: FloatArray) -> FairWorld:
    """The fair world at the snapshot's time, with its new jobs in and its finished ones out.

    `done` is the real progress of the snapshot's jobs, `size` what they need in all (nan where unknown).
    """
    passed = view.now_s - world.at_s
    progress = world.progress + world.speed * passed
    place = np.searchsorted(view.job, world.job)
    here = np.zeros(len(world.job), np.bool_)
    inside = place < len(view)
    here[inside] = view.job[place[inside]] == world.job[inside]
    left = ~here & world.here
    total = np.where(left & np.isnan(world.size), world.done + world.pace * passed, world.size)
    total[here] = size[place[here]]
    ends = (progress >= total) & np.isinf(world.ended_s)
    over = np.where(ends, progress - total, 0.0) / np.maximum(world.speed, 1e-12)
    ended = np.where(ends, np.maximum(view.now_s - over, world.at_s), world.ended_s)
    columns: dict[str, Any] = {
        "progress": np.where(ends, total, progress), "size": total, "ended_s": ended, "here": here,
        "done": np.where(here, done[np.minimum(place, len(view) - 1)], world.done) if len(view) else world.done,
        "curve": _curves(world, view, here, place[here]),
    }  # fmt: skip
    world = msgspec.structs.replace(world, at_s=view.now_s, table=view.rates, **columns)
    world = _pick(world, here | np.isinf(ended))
    known = world.job
    world = _shares(_join(world, view, size), view)
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


def _curves(world: FairWorld, view: Snapshot, here: BoolArray, place: IntArray) -> IntArray:
    """Rows of the snapshot's table; where it is another one, nobody knows those of jobs that have left."""
    same = world.table is view.rates or np.array_equal(world.table, view.rates)
    curve = world.curve.copy() if same else np.full(len(world.job), -1)
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
        "job": view.job[new], "progress": zero, "speed": zero, "share": zero, "size": size[new],
        "ended_s": np.full(count, np.inf), "done": zero, "pace": zero, "curve": view.curve[new],
        "low": view.min_workers[new], "high": view.max_workers[new], "width": np.maximum(view.width[new], 1),
        "here": np.ones(count, np.bool_),
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
    top = view.rates.shape[2] - 1
    rates = view.rates[0]
    low = np.minimum(world.low, top)
    whole = np.minimum(share.astype(np.int64), top)
    part = share - whole
    slow, fast = rates[world.curve, whole], rates[world.curve, np.minimum(whole + 1, top)]
    unit = np.maximum(rates[world.curve, low], 1e-12)
    speed = np.where(share < world.low, share / world.low, (slow + (fast - slow) * part) / unit)
    lost = world.curve < 0
    if lost.any():
        held = lost & (world.share > 0)
        linear = np.where(held, world.speed / np.where(held, world.share, 1.0), 1 / world.low)
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
