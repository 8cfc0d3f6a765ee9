"""Which size a job tries next. Resizing costs little, so its speed is explored while it runs, not assumed.

A job starts where its class was fastest, or at its minimum. From there sizes double while the gain is clear: more than
3 %, and more than the measurements' own errors. What is unclear is measured longer, once; if it stays unclear the sizes
are equal, and the smaller one wins. One clear fall, or two sizes without gain, end the way up; a size between the best
and the next larger one is tried if the fitted curve promises more than 5 % there. A job that began in the middle looks
once at half of that size.

While the way up is open, and the minimums of all jobs fit, the next size is the policy's to give: by what the last
doubling gained (`estimate.belief`) it may be worth more than another's last worker, and otherwise a job that uses
everything would keep all others at their minimum for ever. Every other size is tried with what is free after everybody
has what the policy gives, and that ends as soon as somebody needs it: nobody waits or shrinks for it.

What it costs the job itself, in seconds slower than at the best size, is at most 5 % of what is left of it; of the time
it ran, where nobody knows how long it is. On the way up a size is also tried if it promises to save half as much again
as it may cost. Where jobs share devices or cores, one explores at a time: otherwise each would measure the other.

All of that is a function of what was measured (`Snapshot.measured`), so it can be played again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core import steps
from stretto.core.decision import Decision
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve, Measured
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot

_CLEAR = 0.03
_PROMISE = 1.05
_LEAST_SD = 0.02
"""A few steps that happen to be equal are not exact."""
_ENOUGH_STEPS = curves.TRIAL_STEPS
"""Of a size whose gain is unclear; more of them where steps vary."""
_VARIED, _ENOUGH_VARIED = 0.3, 32
_MOST_SIZES = 8
_TRY_STEPS = 2.5
"""What a try may cost, in steps: five of them at half the speed."""
_BUDGET = 0.05
_PAYS = 1.5
"""A size on the way up that promises to save this many times what the try may cost is tried at once."""
_SILENT_S = 30.0
"""A job that has told of no step by then, or not at the size that it has, keeps nobody else from exploring."""

_REMEMBERED = 10_000
"""Curves that are asked about again and again, unchanged."""
_NOTHING = Curve()

Possible = Callable[[int], int]
"""The largest size of a job that is not above a number."""


class Trial(NamedTuple):
    """The size that a job should be measured at next; 0: it need not be. And when to think of it again."""

    size: int = 0
    wake_s: float = math.inf


def best(seen: Sequence[Measured]) -> Measured:
    """The smallest size that is as fast as the fastest."""
    fastest = min(one.step_s for one in seen)
    return next(one for one in seen if one.step_s * (1 - _CLEAR) <= fastest)


def next_size(curve: Curve, low: int, high: int, possible: Possible) -> int:
    """What is to be measured next, by what was; 0: nothing."""
    seen = _between_limits(curve, low, high)
    if not seen:
        return 0
    top, chosen = seen[-1], best(seen)
    return (
        _up(seen, chosen, top, high, possible) or _between(curve, seen, chosen, possible) or _down(seen, low, possible)
    )


def _up(seen: Sequence[Measured], chosen: Measured, top: Measured, high: int, possible: Possible) -> int:
    following = _doubled(top.workers, high, possible)
    if chosen is top:
        below = seen[-2] if len(seen) > 1 else None
        if below is not None and _gain(below, top) == 0 and not _is_enough(top):
            return top.workers
        return following
    above = [one for one in seen if one.workers > chosen.workers]
    if len(above) > 1 or _gain(chosen, above[0]) < 0:
        return 0
    return following if _is_enough(above[0]) else above[0].workers


def _doubled(workers: int, high: int, possible: Possible) -> int:
    """Twice as many, or the next possible size above; 0: there is none."""
    sizes = (possible(size) for size in range(min(2 * workers, high), high + 1))
    return next((size for size in sizes if size > workers), 0)


def _between(curve: Curve, seen: Sequence[Measured], chosen: Measured, possible: Possible) -> int:
    """A size above the best one, short of the next that was measured."""
    larger = next((one.workers for one in seen if one.workers > chosen.workers), 0)
    middle = possible(round(math.sqrt(chosen.workers * larger)))
    if not chosen.workers < middle < larger or len(seen) >= _MOST_SIZES:
        return 0
    return middle if chosen.step_s > _PROMISE * _promised_s(curve, middle) else 0


@lru_cache(maxsize=_REMEMBERED)
def _promised_s(curve: Curve, workers: int) -> float:
    return float(curves.fit(curve).step_s(np.array([float(workers)]))[0])


def _down(seen: Sequence[Measured], low: int, possible: Possible) -> int:
    """Half of the smallest size, if that is as good as any and the job need not be so wide."""
    smallest = seen[0]
    half = max(possible(smallest.workers // 2), low)
    return half if best(seen) is smallest and half < smallest.workers else 0


def _gain(before: Measured, after: Measured) -> int:
    """1 or -1: clearly faster or slower; 0: not clear."""
    by = math.log(before.step_s / after.step_s)
    limit = max(_CLEAR, 2 * math.hypot(_error(before), _error(after)))
    return 0 if abs(by) <= limit else 1 if by > 0 else -1


def _error(one: Measured) -> float:
    return max(one.sd_log, _LEAST_SD) / math.sqrt(max(one.steps, 1.0))


def _is_enough(one: Measured) -> bool:
    return one.steps >= (_ENOUGH_VARIED if one.sd_log > _VARIED else _ENOUGH_STEPS)


# For a whole snapshot.


def ceilings(view: Snapshot) -> IntArray:
    """The most workers that policies may give each job: what it is known to use well, or, where nobody waits, the next
    size on its way up."""
    enough = known(view)
    if view.explores is None or view.measured is None or _crowded(view):
        return enough
    most, busy = enough.copy(), _Busy(view)
    for j in _candidates(view, enough, view.workers):
        seen = _seen(view, j)
        size = _trial(view, j).size
        if size and (_is_silent(view, j) or busy.take(j)) and seen and best(seen) is seen[-1]:
            most[j] = max(int(enough[j]), size)
    return most


def _crowded(view: Snapshot) -> bool:
    """Whether not even the minimums of all jobs fit."""
    need = view.min_workers * view.width + view.fixed_milli
    return int(need.sum()) > view.total_milli


def known(view: Snapshot) -> IntArray:
    """The most workers that each job is known to use well. One that has told of no step begins where its class was
    fastest, and is not grown."""
    most = view.max_workers.copy()
    if view.explores is None or view.measured is None:
        return most
    guess = view.min_workers if view.guess is None else view.guess
    most = np.where(view.explores, np.maximum(guess, view.workers), most)
    timed = np.isin(view.job, np.fromiter(view.measured, np.int64, len(view.measured))) & view.explores
    at = np.flatnonzero(timed)
    columns = (column[at].tolist() for column in (view.job, view.min_workers, view.max_workers, most))
    rows = zip(*columns, strict=True)
    most[at] = [_best_size(view.measured[number], low, high) or size for number, low, high, size in rows]
    return np.clip(most, view.min_workers, view.max_workers)


def explored(view: Snapshot, most: IntArray, decision: Decision) -> Decision:
    """The decision, with some jobs at sizes that are to be measured. `most` are the ceilings that policies saw."""
    if view.explores is None or view.measured is None:
        return decision
    workers, reason, detail = decision.workers.copy(), decision.reason.copy(), decision.detail.copy()
    free = view.capacity - view.used_milli(workers, np.maximum(decision.pool, 0))
    wake_s, busy = decision.wake_s, _Busy(view)
    enough = np.minimum(known(view), most)
    for j in _candidates(view, enough, workers):
        size = _wanted(view, j)
        more = (size - int(workers[j])) * int(view.width[j])
        if not size or more > free[decision.pool[j]]:
            # When there is room for it, that is an event: it need not be thought of before.
            continue
        trial = _judged(view, j, size)
        wake_s = min(wake_s, trial.wake_s)
        if not trial.size or not (_is_silent(view, j) or busy.take(j)):
            continue
        # A size that is only being measured takes nothing away from a job that was given more, unless it is there to be
        # tried at fewer workers than are known to be of use.
        below = trial.size < enough[j] and bool(_seen(view, j)) and not _is_silent(view, j)
        if more > 0 or trial.size != view.workers[j] or below:
            free[decision.pool[j]] -= more
            workers[j] = trial.size
        seen = _seen(view, j)
        known_best = best(seen).workers if seen else 0
        is_new = known_best > 0 and trial.size not in (known_best, view.workers[j])
        reason[j], detail[j] = Reason.EXPLORES if is_new else Reason.MEASURES, (trial.size, known_best)
    return msgspec.structs.replace(decision, workers=workers, reason=reason, detail=detail, wake_s=wake_s)


def untried(view: Snapshot, workers: IntArray) -> BoolArray:
    """Who explores its sizes, and of whom none above these was ever measured."""
    found = np.zeros(len(view), np.bool_)
    if view.explores is None or view.measured is None:
        return found
    for j in np.flatnonzero(view.explores & (workers > 0)).tolist():
        found[j] = all(one.workers <= workers[j] for one in curves.measured(_curve(view, j)))
    return found


def _candidates(view: Snapshot, enough: IntArray, workers: IntArray) -> Iterator[int]:
    """Whoever has all that it is known to use: first those who are exploring, then the least known."""
    assert view.explores is not None
    assert view.measured is not None
    some = view.explores & (view.workers > 0) & (workers >= enough) & ~view.pinned
    at = np.flatnonzero(some)
    rows = zip(at.tolist(), *(c[at].tolist() for c in (view.job, view.min_workers, view.max_workers)), strict=True)
    sizes = {j: len(_between_limits(view.measured.get(number, _NOTHING), low, high)) for j, number, low, high in rows}
    yield from sorted(sizes, key=lambda j: (view.workers[j] == enough[j], sizes[j], view.job[j]))


def _trial(view: Snapshot, j: int) -> Trial:
    return _judged(view, j, _wanted(view, j))


def _wanted(view: Snapshot, j: int) -> int:
    """The size to be measured next, whatever it costs; 0: none."""
    low, high, now = int(view.min_workers[j]), int(view.max_workers[j]), int(view.workers[j])
    curve = _curve(view, j)
    if now not in curve.workers or not low <= now <= high:
        # Where it is it has not been measured yet.
        return now
    if view.step is None:
        return _next_size(curve, low, high)
    return next_size(curve, low, high, lambda n: _possible(view, j, n))


def _judged(view: Snapshot, j: int, size: int) -> Trial:
    if not size or size == view.workers[j]:
        return Trial(size)
    return _affordable(view, j, _seen(view, j), size)


def _is_silent(view: Snapshot, j: int) -> bool:
    """Whether it has told of no step at the size that it has for so long that nobody knows when it will."""
    there = any(one.workers == view.workers[j] for one in _seen(view, j))
    return not there and view.now_s - float(view.changed_s[j]) > _SILENT_S


def _affordable(view: Snapshot, j: int, seen: Sequence[Measured], size: int) -> Trial:
    """Only as much as 5 % of what is left, or of what it ran, unless it promises to save more than it may cost."""
    chosen = best(seen)
    spent_s = curves.slower_s(seen, chosen.step_s) + 2 * (len(seen) - 1) * float(view.resize_s[j])
    try_s = 2 * float(view.resize_s[j]) + _TRY_STEPS * chosen.step_s
    needs_s = (spent_s + try_s) / _BUDGET
    now, then = _rate(view, j, chosen.workers), _rate(view, j, size)
    if chosen is seen[-1] and then > now > 0:
        needs_s = min(needs_s, _PAYS * try_s / (1 - now / then))
    left_s = float(view.remaining[j]) / now if now > 0 else math.inf
    if math.isfinite(left_s) and view.remaining_sd[j] == 0:
        return Trial(size) if needs_s <= left_s else Trial()
    ran_s = float(view.ran_s[j])
    return Trial(size) if needs_s <= ran_s else Trial(0, view.now_s + needs_s - ran_s + 1e-3)


def _rate(view: Snapshot, j: int, workers: int) -> float:
    """Steps/s as believed, on the pool where it is."""
    rates = view.rates[max(int(view.pool[j]), 0), view.curve[j]]
    return float(rates[min(workers, len(rates) - 1)])


class _Busy:
    """Where jobs share devices or cores one explores at a time."""

    def __init__(self, view: Snapshot) -> None:
        self._view = view
        self._nodes = np.zeros(view.placed.shape[1], np.bool_)
        parts = view.nodes.cpu_milli < view.nodes.devices * GPU
        self._parts: BoolArray = parts if view.placed.shape[1] == len(parts) else self._nodes

    def take(self, j: int) -> bool:
        on = self._view.placed[j] > 0
        if self._view.width[j] >= GPU:
            on = on & self._parts
        if (on & self._nodes).any():
            return False
        self._nodes |= on
        return True


def _seen(view: Snapshot, j: int) -> tuple[Measured, ...]:
    return _between_limits(_curve(view, j), int(view.min_workers[j]), int(view.max_workers[j]))


@lru_cache(maxsize=_REMEMBERED)
def _between_limits(curve: Curve, low: int, high: int) -> tuple[Measured, ...]:
    return tuple(one for one in curves.measured(curve) if low <= one.workers <= high)


@lru_cache(maxsize=_REMEMBERED)
def _best_size(curve: Curve, low: int, high: int) -> int:
    seen = _between_limits(curve, low, high)
    return best(seen).workers if seen else 0


@lru_cache(maxsize=_REMEMBERED)
def _next_size(curve: Curve, low: int, high: int) -> int:
    """Where every size is possible."""
    return next_size(curve, low, high, lambda n: n)


def _curve(view: Snapshot, j: int) -> Curve:
    assert view.measured is not None
    curve: Curve = view.measured.get(int(view.job[j]), _NOTHING)
    return curve


def _possible(view: Snapshot, j: int, size: int) -> int:
    if view.step is None:
        return size
    wish = view.min_workers.copy()
    wish[j] = size
    return int(steps.possible(view, wish)[j]) if size >= view.min_workers[j] else 0
