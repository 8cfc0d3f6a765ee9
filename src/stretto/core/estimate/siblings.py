"""How long a job of unknown length will still run, judged by the jobs submitted around it.

People submit sweeps: jobs of one class that were submitted together need nearly the same time (on the ITP traces,
neighbours submitted within a minute of each other differ by 1 to 7 %). So the sample for a job is the few finished
jobs of its class submitted nearest to it, weighted by closeness, then the class as a whole with a small weight, and a
long tail with a tiny one. Siblings that still run tell something too: what they have attained, the job will need,
unless siblings that have ended say otherwise. Siblings that differ among themselves promise little. A job without
siblings needs at least nearly what the shortest of its class did, if the jobs of that class are alike.

The answer is Gittins-like: the least expected time spent per completion, over all limits one could set.
Sizes are in seconds on the minimum of workers.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

_NEAR = 6
_CLOSE_S = 60.0
_SIBLING_S = 30.0
_PILOT_S = 10.0
_PILOT_SHARE = 0.9
_FEW = 3
_QUANTILES = 12
_CLASS_WEIGHT = 0.05
_TAIL_WEIGHT = 0.01
_FIRST_GUESS_S = 3600.0


class Outlook(msgspec.Struct, frozen=True):
    """For every job of the snapshot, in seconds on its minimum of workers."""

    left: FloatArray
    """Effective time left: smaller goes first."""
    least: FloatArray
    """What the job will need in all, at least: what it has attained, or what its siblings or its class needed."""


def outlook(view: Snapshot, attained: FloatArray) -> Outlook:
    """Judge every job by its siblings."""
    history = view.history
    proven = _by_pilots(view, attained)
    if len(history) < _FEW:
        return Outlook(_FIRST_GUESS_S + proven, proven)
    start, stop = np.searchsorted(history.klass, (view.klass, view.klass + 1))
    at = np.searchsorted(_key(history.klass, history.job), _key(view.klass, view.job))
    near = at[:, None] + np.arange(-_NEAR, _NEAR)
    inside = (near >= start[:, None]) & (near < stop[:, None])
    near = np.clip(near, 0, len(history) - 1)
    size = history.size_s[near]
    apart_s = np.abs(history.submit_s[near] - view.submit_s[:, None])
    weight = np.where(inside, 1 / (1 + apart_s / _CLOSE_S), 0.0)
    sibling = inside & (apart_s < _SIBLING_S) & (size > _PILOT_SHARE * attained[:, None])
    left = _gittins(*_with_class(view, size, weight, proven), attained, proven)
    least = np.where(sibling.any(axis=1), np.maximum(attained, _least(size, sibling)), _by_class(view, proven))
    return Outlook(left, least)


def _key(klass: IntArray, job: IntArray) -> IntArray:
    key: IntArray = klass * np.int64(2**40) + job
    return key


def _least(size: FloatArray, sibling: BoolArray) -> FloatArray:
    """What the shortest sibling needed; less where siblings differ, as much as they do."""
    shortest = np.where(sibling, size, np.inf).min(axis=1)
    longest = np.where(sibling, size, -np.inf).max(axis=1)
    trust = np.minimum(_PILOT_SHARE, shortest / np.maximum(longest, 1e-12))
    return np.where(np.isfinite(shortest), trust * shortest, 0.0)


def _by_class(view: Snapshot, proven: FloatArray) -> FloatArray:
    """Nearly what the shortest of its class needed, where the jobs of that class are alike; what is proven, otherwise.

    Classes whose shortest job took less than half of the usual time promise nothing.
    """
    history = view.history
    ascending = history.size_s[np.lexsort((history.size_s, history.klass))]
    start, stop = np.searchsorted(history.klass, (view.klass, view.klass + 1))
    last = len(ascending) - 1
    shortest, usual = ascending[np.minimum(start, last)], ascending[np.minimum((start + stop) // 2, last)]
    alike = np.clip(2 * shortest / np.maximum(usual, 1e-12) - 1, 0.0, _PILOT_SHARE)
    return np.where(stop - start >= _FEW, np.maximum(proven, alike * shortest), proven)


def _by_pilots(view: Snapshot, attained: FloatArray) -> FloatArray:
    """What each job has attained, or nearly what an active sibling submitted at the same moment has."""
    order = np.lexsort((view.job, view.klass))
    klass, submit, reached = view.klass[order], view.submit_s[order], attained[order]
    proven = reached.copy()
    for step in (1, 2, 3):
        if len(order) <= step:
            break
        together = (klass[step:] == klass[:-step]) & (submit[step:] - submit[:-step] < _PILOT_S)
        for here, there in ((slice(step, None), slice(None, -step)), (slice(None, -step), slice(step, None))):
            proven[here] = np.where(together, np.maximum(proven[here], _PILOT_SHARE * reached[there]), proven[here])
    result = np.empty(len(order))
    result[order] = proven
    return result


def _with_class(
    view: Snapshot, size: FloatArray, weight: FloatArray, proven: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Add the quantiles of the job's class (of all jobs, where it is new) and a tail to every job's sample."""
    history = view.history
    order = np.lexsort((history.size_s, history.klass))
    ascending = history.size_s[order]
    start, stop = np.searchsorted(history.klass, (view.klass, view.klass + 1))
    spots = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    own = ascending[np.minimum((start[:, None] + spots * (stop - start)[:, None]).astype(np.int64), len(order) - 1)]
    everyone = np.sort(history.size_s)[(spots * len(order)).astype(np.int64)]
    usual = np.where((stop - start)[:, None] >= _FEW, own, everyone)
    # A second at least: where all that ended were empty, nothing would lie ahead.
    tail = 2 * np.maximum(np.maximum(proven, usual[:, -1]), 1.0)
    n = len(view)
    sizes = np.concatenate((size, usual, tail[:, None]), axis=1)
    share = np.concatenate(
        (weight, np.full((n, _QUANTILES), _CLASS_WEIGHT / _QUANTILES), np.full((n, 1), _TAIL_WEIGHT)), axis=1
    )
    return sizes, share


def _gittins(size: FloatArray, weight: FloatArray, attained: FloatArray, proven: FloatArray) -> FloatArray:
    """Row by row: the least, over all limits, of (expected time spent up to the limit) / (chance to end by it)."""
    order = np.argsort(size, axis=1, kind="stable")
    size, weight = np.take_along_axis(size, order, 1), np.take_along_axis(weight, order, 1)
    weight = np.where(size > proven[:, None], weight, 0.0)
    more = np.maximum(0.0, size - attained[:, None])
    chance = np.cumsum(weight, axis=1)
    spent = np.cumsum(weight * more, axis=1) + (chance[:, -1:] - chance) * more
    per_end = np.where(weight > 0, spent / np.maximum(chance, 1e-300), np.inf)
    left: FloatArray = per_end.min(axis=1)
    return left
