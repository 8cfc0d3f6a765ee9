"""What a stop costs a job: its level, how often it saves, and so the work that is undone.

A job of level `elastic` loses nothing when it is stopped or resized. One of level `restart` goes on from its last
checkpoint: it saves every `checkpoint_s` seconds of progress, or, where that is 0, when it is told to stop. One of
level `rigid` never saves: it begins again from nothing, and has one size only. Where no level is said a stop loses
nothing.

The trace says it job by job, and the world's settings say it for jobs of which the trace says nothing.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray, IntArray
from stretto.sim.trace import LEVELS, RESTART, RIGID, UNSAID, Trace
from stretto.sim.world import Settings


class Stakes(msgspec.Struct, frozen=True):
    """What stops mean to the jobs of a trace, in its order."""

    every_s: FloatArray
    """Seconds of progress between two checkpoints; 0: a stop loses nothing; inf: it loses everything."""
    fragile: BoolArray
    """Who would lose work if it were stopped at any moment."""
    preemptible: BoolArray


def settled(trace: Trace, settings: Settings) -> Trace:
    """The trace with the world's level filled in; jobs of level `rigid` have the size they asked for, and no other."""
    level = _level(trace, settings)
    if level is None:
        return trace
    fixed = (level == RIGID) & ~_serves(trace)
    asked = np.clip(trace.requested, trace.min_workers, trace.max_workers)
    return msgspec.structs.replace(
        trace,
        level=level,
        min_workers=np.where(fixed, asked, trace.min_workers),
        max_workers=np.where(fixed, asked, trace.max_workers),
    )


def stakes(trace: Trace, settings: Settings) -> Stakes | None:
    """What stops mean here; None where nobody loses anything by them, and everybody may be stopped."""
    level = _level(trace, settings)
    if level is None:
        level = np.full(len(trace), UNSAID)
    every_s = np.where(level == RESTART, checkpoints_s(trace, settings), 0.0)
    every_s[level == RIGID] = math.inf
    every_s[_serves(trace)] = 0.0
    preemptible = _preemptible(trace, settings, level)
    if not every_s.any() and preemptible.all():
        return None
    return Stakes(every_s, every_s > 0, preemptible)


def checkpoints_s(trace: Trace, settings: Settings) -> FloatArray:
    """How often each job saves."""
    return column_s(trace.checkpoint_s, settings.checkpoint_s, len(trace))


def column_s(own_s: FloatArray | None, of_the_world_s: float, jobs: int) -> FloatArray:
    """Each job's own seconds, and the world's where it has none."""
    if own_s is None:
        return np.full(jobs, of_the_world_s)
    filled: FloatArray = np.where(np.isnan(own_s), of_the_world_s, own_s)
    return filled


def _level(trace: Trace, settings: Settings) -> IntArray | None:
    if trace.level is None and not settings.level:
        return None
    own = np.full(len(trace), UNSAID) if trace.level is None else trace.level
    filled: IntArray = np.where(own == UNSAID, LEVELS.index(settings.level) if settings.level else UNSAID, own)
    return filled


def _preemptible(trace: Trace, settings: Settings, level: IntArray) -> BoolArray:
    """Unless somebody says otherwise, only jobs that begin again from nothing may not be stopped for urgent ones."""
    of_level: BoolArray = level != RIGID
    if settings.preemptible is not None:
        of_level = np.full(len(trace), settings.preemptible)
    if trace.preemptible is None:
        return of_level
    said: BoolArray = np.where(trace.preemptible == UNSAID, of_level, trace.preemptible > 0)
    return said


def _serves(trace: Trace) -> BoolArray:
    if not trace.services:
        return np.zeros(len(trace), np.bool_)
    return np.array([load is not None for load in trace.services], np.bool_)
