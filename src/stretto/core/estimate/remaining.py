"""How much is left of a job, in steps and in seconds, and how sure that is.

Work left comes from the known total of steps, or from an estimate of the total that is corrected by what the job has
already outlived. Time left is that over the speed. The uncertainty is the standard deviation of the logarithm: 0.1 is
about ten per cent either way, 1 about a factor of three.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np

from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.core.estimate.history import Length
from stretto.core.snapshot import FloatArray, Snapshot

_POINTS = 64
_LINDY_SD = 1.0

_AT_LEAST_S = 60.0
"""A job of which nothing is known, not even a past, is taken to last so long."""


class Remaining(msgspec.Struct, frozen=True):
    """Means, and the standard deviation of log(remaining): 0 when exact."""

    steps: float
    steps_sd: float
    seconds: float
    """inf on no workers."""
    seconds_sd: float


def remaining(total: float | Length, done: float, curve: Curve, workers: int, prior: Curve | None = None) -> Remaining:
    """What is left of a job that has done so many steps of a known or estimated total, on so many workers."""
    steps, steps_sd = (max(total - done, 0.0), 0.0) if isinstance(total, int | float) else left_of(total, done)
    if workers < 1:
        return Remaining(steps, steps_sd, 0.0 if steps == 0 else math.inf, steps_sd)
    each = float(curves.step_s(curve, np.array([float(workers)]), prior)[0])
    speed_sd = curves.sd_log(curve, workers, prior) if steps > 0 else 0.0
    return Remaining(steps, steps_sd, steps * each, math.hypot(steps_sd, speed_sd))


def left_of(total: Length, done: float) -> tuple[float, float]:
    """Mean, and standard deviation of the log, of what is left of a log-normal total that is larger than `done`."""
    if done <= 0:
        return math.exp(total.mean_log + total.sd_log**2 / 2), total.sd_log
    normal = NormalDist(total.mean_log, max(total.sd_log, 1e-6))
    passed = normal.cdf(math.log(done))
    if passed > 1 - 1e-9:
        # It has outlived everything that was expected: as long again, and little is sure.
        return done, _LINDY_SD
    shares = passed + (1 - passed) * (np.arange(_POINTS) + 0.5) / _POINTS
    left = np.exp([normal.inv_cdf(min(float(share), 1 - 1e-12)) for share in shares]) - done
    left = np.maximum(left, 1e-9 * done)
    return float(left.mean()), float(np.log(left).std())


def expected_steps(view: Snapshot) -> FloatArray:
    """Steps that each job has left: as known, else as the finished jobs of its class suggest. Never nan.

    Of those that took longer than this one has come so far, the mean of what they had left. Without any, a job is
    expected to last as long again as it has, and a minute at least.
    """
    left = view.remaining.copy()
    unknown = np.flatnonzero(np.isnan(left))
    if not len(unknown):
        return left
    speed = _speed(view)
    came_s = np.divide(view.done, speed, out=np.zeros(len(view)), where=speed > 0)
    sizes: dict[int, FloatArray] = {}
    for j in unknown.tolist():
        klass = int(view.klass[j])
        if klass not in sizes:
            sizes[klass] = _sizes(view, klass)
        left[j] = mean_left_s(sizes[klass], float(came_s[j])) * speed[j]
    return left


def mean_left_s(sizes_s: FloatArray, came_s: float) -> float:
    """What jobs of these sizes (ascending) have left on average after so many seconds."""
    longer = sizes_s[np.searchsorted(sizes_s, came_s, side="right") :]
    if len(longer):
        return float(longer.mean()) - came_s
    return max(came_s, _AT_LEAST_S)


def _speed(view: Snapshot) -> FloatArray:
    """Steps per second on the minimum of workers, in which history counts; at best, where that makes no progress."""
    own = np.maximum(view.pool, 0)
    speed = view.rates[own, view.curve, np.minimum(view.min_workers, view.rates.shape[2] - 1)]
    best: FloatArray = np.where(speed > 0, speed, view.rates[own, view.curve].max(axis=1))
    return best


def _sizes(view: Snapshot, klass: int) -> FloatArray:
    """Of the class, or of everyone where it is new; ascending."""
    own = view.history.of_class(klass).size_s
    return np.sort(own if len(own) else view.history.size_s)
