"""Throughput as a function of workers, learned online from windows of steps that were timed at one size.

The global batch is constant, so a step on n workers takes

    serial + parallel / n + sync * (n - 1)       each >= 0

(Amdahl's law with a cost of synchronisation that grows with n, as in alpha-beta models.) The three are fitted to what
was observed, in relative terms, with a mild pull of `serial` and `sync` to zero: a job that was seen at one size only
is expected to scale linearly, and each further size teaches where that ends. Near the sizes that were seen, what was
measured outweighs the formula. A prior, the curve of earlier runs of the class, counts like a few observations.

What a job needs is the mean of its steps, but single steps that were far slower than the others (a page fault, a hiccup
of the machine) must not decide between sizes. So the steps that were much slower are kept apart: where they come again
and make a difference (evaluations, batches of many lengths) what they cost per step is added. A size where too few of
them were seen borrows from the others, so that it does not look faster for want of an evaluation.

The rates handed out start at 0, never fall with more workers and are never nan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray

_MEMORY = 100.0
"""Observations like the latest that count at one size: what is older fades, so that a curve may change."""
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-3, 1e9
_OUTLIER = 3.0
_STRANGE_WINDOWS, _STRANGE_BY, _STRANGE_SD = 5, 0.15, 3.0
"""So many windows in a row that are off by more than this, and by more than they usually are: the job has changed."""
_DRIFT_WINDOWS = 20
_AGAIN = 10.0
"""A job is measured anew only after so many times what its last exploration cost."""
TRIAL_STEPS = 16
"""So many steps at a size are enough to try it."""
_VARIED = 0.3
"""Steps that spread by more than this part of their median: it is no measure of what they take on average."""
_AGAIN_SLOW, _SLOW_SHARE = 3.0, 0.15
"""So many slow steps, which add so much to the others: they are a part of the job."""
_BORROWED = 5.0
"""What is known of slow steps at all sizes counts like so many of them at each."""
_PRIOR_WEIGHT = 2.0
_PULL = 0.05
_NOISE = 0.2
_PER_DOUBLING = 0.25
"""Growth of the standard deviation of log(time) with each doubling away from a size that was seen."""
_MODEL_SD = 0.02
_FIRST_STEP_S = 1.0
"""A step of a job of which nothing at all is known."""
_LONGEST_S = 1e9
_HAIR = 1e-12
_SUBSETS = np.array([[0, 1, 0], [1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 0, 0], [1, 1, 1]], np.float64)
"""Which of serial, parallel and sync are not zero, simple ones first; sync alone would make one worker infinitely
fast."""


class Window(msgspec.Struct, frozen=True):
    """Steps on so many workers, timed one after the other by one of them."""

    workers: int
    count: int
    median_s: float
    spread_s: float
    """Standard deviation of a single step."""
    began_s: float
    ended_s: float
    mean_s: float = 0.0
    """0: not told."""
    slow: int = 0
    """Steps besides `count` that took several times as long, and are in none of the other figures."""
    slow_s: float = 0.0
    """What these took together."""

    @property
    def typical_s(self) -> float:
        """A step that is not slow: the median, or, where steps vary, the mean."""
        return self.mean_s if self.mean_s > 0 and self.spread_s > _VARIED * self.median_s else self.median_s

    @property
    def rate(self) -> float:
        """Steps per second; a single slow one does not count."""
        if self.slow < 2:
            return 1 / self.typical_s
        return (self.count + self.slow) / (self.count * self.typical_s + self.slow_s)


class Measured(NamedTuple):
    """What a curve says of one size that was seen."""

    workers: int
    steps: float
    """How many are remembered: older ones fade."""
    step_s: float
    sd_log: float
    """Of log(time) of a single step, changes between windows included."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return 1 / self.step_s

    @property
    def spread(self) -> float:
        """Standard deviation of the rate, step by step."""
        return self.rate * self.sd_log

    @property
    def standard_error(self) -> float:
        """Of log(step_s)."""
        return self.sd_log / math.sqrt(self.steps)


class Curve(msgspec.Struct, frozen=True):
    """What was observed of one job, per number of workers: how many steps, mean and squared deviations of
    log(step_s)."""

    workers: tuple[int, ...] = ()
    count: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    squares: tuple[float, ...] = ()
    strange: int = 0
    """Windows in a row that were far slower (or, below zero, faster) than what was seen at their size before."""
    drift: float = 0.0
    """Mean square of log(step_s) of a window against what was seen at its size before: by so much its speed wanders."""
    began_s: float = 0.0
    """When the first of these windows began."""
    slow: tuple[float, ...] = ()
    """Steps per size that took several times as long as those which are counted; empty: none."""
    slow_s: tuple[float, ...] = ()
    """What these took together, per size."""

    def __post_init__(self) -> None:
        """What is read from elsewhere is refused where it is no curve."""
        if not len(self.workers) == len(self.count) == len(self.mean) == len(self.squares):
            raise ValueError("a curve has as many counts, means and squares as sizes")
        if not {len(self.slow), len(self.slow_s)} <= {0, len(self.workers)} or len(self.slow) != len(self.slow_s):
            raise ValueError("a curve has slow steps at none or at all of its sizes")
        if not all(0 <= one < math.inf for one in (*self.slow, *self.slow_s)):
            raise ValueError("the slow steps of a curve can be counted")
        largest, longest_log = 10**6, 700.0
        if not all(0 < count < math.inf for count in self.count) or not all(
            0 <= one < math.inf for one in self.squares
        ):
            raise ValueError("a curve has sizes that were seen")
        following = (*self.workers[1:], largest)
        if not all(1 <= size < larger for size, larger in zip(self.workers, following, strict=False)):
            raise ValueError("the sizes of a curve ascend from one worker")
        if not all(abs(mean) < longest_log for mean in self.mean):
            raise ValueError("the steps of a curve take some time, and not for ever")

    @property
    def widest(self) -> int:
        """The most workers it was seen with; 0 before anything was."""
        return max(self.workers, default=0)

    def unlike(self, window: Window) -> bool:
        """Whether that window, taken in last, shows another job than the ones before it did, if there were any."""
        return abs(self.strange) >= _STRANGE_WINDOWS or self.began_s == window.began_s


class Model(msgspec.Struct, frozen=True):
    """Seconds of a step: serial + parallel / n + sync * (n - 1)."""

    serial: float
    parallel: float
    sync: float

    def step_s(self, workers: FloatArray) -> FloatArray:
        step: FloatArray = self.serial + self.parallel / workers + self.sync * (workers - 1)
        return step


def observe(curve: Curve, workers: int, step_s: float, steps: float = 1.0, spread_s: float = 0.0) -> Curve:
    """The curve after one more observation: the median of so many steps, and their standard deviation. One that cannot
    be (no workers, no time, nan) teaches nothing."""
    if workers < 1 or not 0 < step_s < math.inf or not steps > 0 or not 0 <= spread_s < math.inf:
        return curve
    value = math.log(min(max(step_s, 1 / _LONGEST_S), _LONGEST_S))
    steps = min(max(steps, _LEAST_WEIGHT), _MOST_WEIGHT)
    own = steps * min(spread_s / step_s, 1.0) ** 2
    if workers not in curve.workers:
        return _with(curve, workers, steps, value, own)
    i = curve.workers.index(workers)
    count, mean, squares = curve.count[i], curve.mean[i], curve.squares[i]
    if count >= 3 * steps:
        # A swapped machine, a neighbour that has just come: seen, but not believed in full.
        limit = _OUTLIER * max(math.sqrt(squares / count), _NOISE / 2)
        value = min(max(value, mean - limit), mean + limit)
    kept = min(count, (_MEMORY - 1) * steps)
    squares *= kept / count
    curve = _fade_slow(curve, i, kept / count)
    change = value - mean
    mean += change * steps / (kept + steps)
    return _with(curve, workers, kept + steps, mean, squares + own + steps * change * (value - mean))


def take_in(curve: Curve, window: Window) -> Curve:
    """The curve after one more window. When several in a row are far from what was seen at their size, to the same
    side, and farther than they usually are, the job is not what it was: all that is known of it is what it does now."""
    off = _off(curve, window)
    limit = max(_STRANGE_BY, _STRANGE_SD * math.sqrt(curve.drift))
    strange = _strange(curve, off, limit)
    drift = curve.drift + (min(abs(off), limit) ** 2 - curve.drift) / _DRIFT_WINDOWS
    if abs(strange) >= _STRANGE_WINDOWS:
        fastest_s = min(one.step_s for one in measured(curve))
        if window.ended_s - curve.began_s < _AGAIN * slower_s(measured(curve), fastest_s):
            return msgspec.structs.replace(curve, strange=strange)
        curve, strange = Curve(), 0
    taken = observe(curve, window.workers, window.typical_s, window.count, window.spread_s)
    if taken is curve:
        return curve
    taken = _add_slow(taken, window)
    began_s = curve.began_s if curve.workers else window.began_s
    return msgspec.structs.replace(taken, strange=strange, drift=drift, began_s=began_s)


def slower_s(seen: Iterable[Measured], than_s: float) -> float:
    """What trying these sizes cost, against steps of that length. Whoever stayed longer at one had another reason."""
    return sum(min(one.steps, TRIAL_STEPS) * max(0.0, one.step_s - than_s) for one in seen)


def _off(curve: Curve, window: Window) -> float:
    """log(step_s) against what was seen at this size; 0 where nothing was."""
    if window.workers not in curve.workers or not 0 < window.typical_s < math.inf:
        return 0.0
    return math.log(window.typical_s) - curve.mean[curve.workers.index(window.workers)]


def _strange(curve: Curve, off: float, limit: float) -> int:
    """How many windows in a row, this one included, were slower (or, below zero, faster) than seen before."""
    if abs(off) <= limit:
        return 0
    sign = 1 if off > 0 else -1
    return curve.strange + sign if curve.strange * sign >= 0 else sign


def measured(curve: Curve) -> list[Measured]:
    """The sizes that were seen, smallest first."""
    rows = zip(curve.workers, curve.count, curve.mean, curve.squares, _beside(curve), strict=True)
    return [
        _measured(workers, count, math.exp(mean), squares / count, beside)
        for workers, count, mean, squares, beside in rows
    ]


def measured_s(curve: Curve) -> dict[int, float]:
    """Seconds of a step at each size that was seen, as measured."""
    return dict(zip(curve.workers, _times_s(curve).tolist(), strict=True))


def slow_steps_s(curve: Curve) -> float:
    """What slow steps add to each of the others, over all sizes; 0 where they are no part of the job."""
    counted = sum(count + slow for count, slow in zip(curve.count, curve.slow, strict=True)) if curve.slow else 0.0
    more_s = _slow_more_s(curve)
    return sum(more_s) / counted if more_s else 0.0


def rates(curve: Curve, max_workers: int, prior: Curve | None = None) -> FloatArray:
    """Steps per second on 0, 1, … max_workers workers."""
    n = np.arange(1, max_workers + 1, dtype=np.float64)
    rising = np.maximum.accumulate(1 / step_s(curve, n, prior)) if max_workers > 0 else n
    return np.concatenate(([0.0], rising))


def step_s(curve: Curve, workers: FloatArray, prior: Curve | None = None) -> FloatArray:
    """Expected seconds of a step on so many workers."""
    seen = curve if curve.workers else prior or curve
    if not seen.workers:
        linear: FloatArray = _FIRST_STEP_S / workers
        return linear
    sizes, times, weights = _evidence(curve, prior)
    model = _fit(sizes, times, weights)
    # One observation is worth as much as the formula; many that agree are worth all of it.
    believed = weights**2 / (weights**2 + (_noise(seen) / _NOISE) ** 2)
    off = np.log(times / model.step_s(sizes)) * believed
    expected: FloatArray = model.step_s(workers) * np.exp(np.interp(np.log(workers), np.log(sizes), off))
    return expected


def fit(curve: Curve, prior: Curve | None = None) -> Model:
    """The formula that explains what was seen best."""
    return _fit(*_evidence(curve, prior))


def sd_log(curve: Curve, workers: int, prior: Curve | None = None) -> float:
    """Standard deviation of log(step time) on so many workers: falls with data, grows away from it."""
    seen = curve if curve.workers else prior
    if seen is None or not seen.workers:
        return 1.0 + _PER_DOUBLING * math.log2(max(workers, 1))
    apart = [abs(math.log2(max(workers, 1) / size)) for size in seen.workers]
    nearest = int(np.argmin(apart))
    own = _noise(seen) / math.sqrt(seen.count[nearest])
    borrowed = 0.5 if seen is prior else 0.0
    return math.sqrt(own**2 + (_PER_DOUBLING * apart[nearest]) ** 2 + borrowed**2 + _MODEL_SD**2)


def cap(widest_seen: int, max_workers: int, min_workers: int = 1) -> int:
    """Explore by doubling: at most twice what was seen, so that a wrong guess costs little."""
    return min(max(2 * widest_seen, min_workers, 1), max_workers)


def _with(curve: Curve, workers: int, count: float, mean: float, squares: float) -> Curve:
    rows = {w: row for w, *row in zip(curve.workers, curve.count, curve.mean, curve.squares, strict=True)}
    rows[workers] = [count, mean, squares]
    sizes = tuple(sorted(rows))
    counts, means, spreads = zip(*(rows[w] for w in sizes), strict=True)
    slow = dict(zip(curve.workers, zip(curve.slow, curve.slow_s, strict=True), strict=False))
    some = [slow.get(w, (0.0, 0.0)) for w in sizes] if slow else []
    return Curve(
        sizes, counts, means, spreads, curve.strange, curve.drift, curve.began_s,
        tuple(steps for steps, _ in some), tuple(seconds for _, seconds in some),
    )  # fmt: skip


def _fade_slow(curve: Curve, i: int, by: float) -> Curve:
    if not curve.slow or by == 1:
        return curve
    slow, slow_s = list(curve.slow), list(curve.slow_s)
    slow[i], slow_s[i] = slow[i] * by, slow_s[i] * by
    return msgspec.structs.replace(curve, slow=tuple(slow), slow_s=tuple(slow_s))


def _add_slow(curve: Curve, window: Window) -> Curve:
    if not window.slow or not 0 < window.slow_s < math.inf:
        return curve
    i = curve.workers.index(window.workers)
    slow, slow_s = (list(column) or [0.0] * len(curve.workers) for column in (curve.slow, curve.slow_s))
    slow[i], slow_s[i] = slow[i] + window.slow, slow_s[i] + window.slow_s
    return msgspec.structs.replace(curve, slow=tuple(slow), slow_s=tuple(slow_s))


class _Beside(NamedTuple):
    """What slow steps add to each of the others, and how far off that may be."""

    each_s: float = 0.0
    error_s: float = 0.0


def _beside(curve: Curve) -> list[_Beside]:
    """Per size. Its own slow steps, as far as there are some; else those of all sizes, as if they did not scale."""
    more_s = _slow_more_s(curve)
    if not more_s:
        return [_Beside()] * len(curve.workers)
    pooled_s = slow_steps_s(curve)
    rows = zip(curve.count, curve.slow, more_s, strict=True)
    return [_borrowing(slow, more / (count + slow), pooled_s) for count, slow, more in rows]


def _borrowing(slow: float, own_s: float, pooled_s: float) -> _Beside:
    share = slow / (slow + _BORROWED)
    return _Beside(share * own_s + (1 - share) * pooled_s, share * own_s / math.sqrt(slow) if slow else 0.0)


def _slow_more_s(curve: Curve) -> list[float]:
    """How much longer the slow steps of each size took than others; empty where they are no part of the job."""
    if sum(curve.slow) < _AGAIN_SLOW:
        return []
    usual_s = [math.exp(mean) for mean in curve.mean]
    rows = zip(curve.slow, curve.slow_s, usual_s, strict=True)
    more_s = [max(0.0, slow_s - slow * each_s) for slow, slow_s, each_s in rows]
    usually_s = sum(count * each_s for count, each_s in zip(curve.count, usual_s, strict=True))
    return more_s if sum(more_s) > _SLOW_SHARE * usually_s else []


def _measured(workers: int, count: float, usual_s: float, variance: float, beside: _Beside) -> Measured:
    """An error of the mean is told as the spread of single steps that would make it."""
    step_s = usual_s + beside.each_s
    return Measured(workers, count, step_s, math.sqrt(variance + count * (beside.error_s / step_s) ** 2))


def _times_s(curve: Curve) -> FloatArray:
    """Seconds of a step at each size that was seen."""
    times_s = np.exp(np.array(curve.mean, np.float64))
    return times_s + np.array([beside.each_s for beside in _beside(curve)]) if curve.slow else times_s


def _evidence(curve: Curve, prior: Curve | None) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Sizes (ascending), step times and weights of what was seen of the job, and where it was not, of its class.

    The class is scaled to the job's speed.
    """
    sizes, times = np.array(curve.workers, np.float64), _times_s(curve)
    weights = np.sqrt(np.array(curve.count, np.float64))
    if prior is None or not prior.workers:
        return sizes, times, weights
    others, theirs = np.array(prior.workers, np.float64), _times_s(prior)
    if len(sizes):
        at_ours = step_s(prior, sizes)
        theirs = theirs * math.exp(float(np.average(np.log(times / at_ours), weights=weights**2)))
    trust = np.sqrt(np.minimum(np.array(prior.count), _PRIOR_WEIGHT))
    new = ~np.isin(others, sizes)
    sizes, times = np.concatenate((sizes, others[new])), np.concatenate((times, theirs[new]))
    order = np.argsort(sizes)
    return sizes[order], times[order], np.concatenate((weights, trust[new]))[order]


def _fit(sizes: FloatArray, times: FloatArray, weights: FloatArray) -> Model:
    if not len(sizes):
        return Model(0.0, _FIRST_STEP_S, 0.0)
    features = np.column_stack((np.ones(len(sizes)), 1 / sizes, sizes - 1))
    usual = float(np.exp(np.mean(np.log(times))))
    widest = float(sizes.max())
    pull = np.array([[_PULL / usual, 0.0, 0.0], [0.0, 0.0, _PULL * widest / usual]])
    rows = np.concatenate((features / times[:, None] * weights[:, None], pull))
    target = np.concatenate((weights, np.zeros(2)))
    best = _least_squares(rows, target)
    return Model(*best.tolist())


def _least_squares(rows: FloatArray, target: FloatArray) -> FloatArray:
    """Least squares with three non-negative unknowns: the best of all choices of which are not zero."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    rows = rows / scale
    # A hair on the diagonal keeps columns that look the same apart.
    squares = (rows.T @ rows + _HAIR * np.eye(3)) * _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
    absent = np.eye(3) * (1 - _SUBSETS)[:, None, :]
    answers = np.linalg.solve(squares + absent, (_SUBSETS * (rows.T @ target))[:, :, None])[:, :, 0]
    errors = ((rows @ answers.T - target[:, None]) ** 2).sum(axis=0)
    errors[(answers < 0).any(axis=1) | (answers[:, :2].max(axis=1) <= 0)] = math.inf
    best: FloatArray = answers[int(np.argmax(errors <= errors.min() + 1e-12))] / scale
    return best


def _noise(curve: Curve) -> float:
    """Standard deviation of a single log(step time), over all sizes; two observations' worth of a guess."""
    extra = sum(curve.count) - len(curve.count)
    return math.sqrt((sum(curve.squares) + 2 * _NOISE**2) / (extra + 2))
