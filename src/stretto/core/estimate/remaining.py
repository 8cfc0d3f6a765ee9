"""How much is left of a job, in steps and in seconds, and how sure that is.

Work left comes from the known total of steps, or from an estimate of the total that is corrected by what the job has
already outlived. Time left is that over the speed. The uncertainty is the standard deviation of the logarithm: 0.1 is
about ten per cent either way, 1 about a factor of three.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.core.estimate.history import Length
from stretto.core.snapshot import FloatArray, Snapshot

_POINTS = 64
_LINDY_SD = 1.0
_LOST = math.log(1e9)

_Z = np.arange(-900, 901) / 100
_RARE = -np.array(
    [math.log1p(-math.erfc(-z / 2**0.5) / 2) if z < 0 else math.log(math.erfc(z / 2**0.5) / 2) for z in _Z]
)
"""-log of the chance that a standard normal is beyond `_Z`, rising."""

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
    mean, sd = left_of_all(np.array([total.mean_log]), np.array([total.sd_log]), np.array([done]))
    return float(mean[0]), float(sd[0])


def left_of_all(mean_log: FloatArray, sd_log: FloatArray, done: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`left_of` for many jobs at once: the means, and the standard deviations of the logs."""
    mean, sd = np.exp(mean_log + sd_log**2 / 2), sd_log.copy()
    begun = np.flatnonzero(done > 0)
    if len(begun):
        mean[begun], sd[begun] = _left_of_begun(mean_log[begun], sd_log[begun], done[begun])
    return mean, sd


def left_of_hints(mean_log: FloatArray, sd_log: FloatArray, done: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same where somebody has said how long: what has outlived that (the mean) lasts as long again."""
    mean, sd = left_of_all(mean_log, sd_log, done)
    outlived = done >= (1 - 1e-9) * np.exp(mean_log + sd_log**2 / 2)
    return np.where(outlived, done, mean), np.where(outlived, _LINDY_SD, sd)


def _left_of_begun(mean_log: FloatArray, sd_log: FloatArray, done: FloatArray) -> tuple[FloatArray, FloatArray]:
    sd = np.maximum(sd_log, 1e-6)
    outlived = np.interp((np.log(done) - mean_log) / sd, _Z, _RARE)
    # Where it may end: points that share what is left of the distribution evenly.
    points = np.interp(outlived[:, None] - np.log1p(-(np.arange(_POINTS) + 0.5) / _POINTS), _RARE, _Z)
    with np.errstate(over="ignore"):
        left = np.exp(mean_log[:, None] + sd[:, None] * points) - done[:, None]
    left = np.maximum(left, 1e-9 * done[:, None])
    # Who has outlived everything that was expected: as long again, and little is sure.
    lost = outlived > _LOST
    return np.where(lost, done, left.mean(axis=1)), np.where(lost, _LINDY_SD, np.log(left).std(axis=1))


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
