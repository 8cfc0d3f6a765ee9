"""Time shares: which fraction of the time each job should spend on each device type.

A table X[job, pool] ≥ 0 in which no job has more than all of its time (sum over pools ≤ 1) and no pool gives more GPUs
than it has (sum over jobs of GPUs × X ≤ capacity). `gain[job, pool]` is what a job has of its time there; where it is
0 the job never goes. Rows are jobs that can run somewhere.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray
from stretto.errors import MissingExtra, PolicyError

_GRACE = 0.01
"""How far below the optimum, relatively, a central solution may stay."""
_STEPS = 100
_DIGITS = 1e9


def in_order(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """All of the time where the gain is largest among pools with room, job by job, up to the first that finds none."""
    share, free = np.zeros(gain.shape), capacity.copy()
    for j, wide in enumerate(gpus.tolist()):
        if not (free >= wide).any():
            break
        best = int(np.argmax(np.where(free >= wide, gain[j], -1.0)))
        if gain[j, best] > 0:
            share[j, best] = 1.0
            free[best] -= wide
    return share


def most(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """X with the largest sum of gain × X."""
    return _optimum(gain / gain.max(), gpus, capacity, goal=None)[0]


def fairest(gain: FloatArray, gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """X whose worst-off job, by sum over pools of gain × X, has 99 % of the most possible: the centre of all such X.

    The centre is unique and treats equal jobs alike, whatever the solver.
    """
    best = gain.max(axis=1)
    goal = best.min() / best
    # With gains up to 1 and goals shrunk to what the cluster could give everybody, the optimum is near 1.
    goal *= min(1.0, capacity.sum() / (gpus @ goal))
    gain = gain / best[:, None]
    optimum, level = _optimum(gain, gpus, capacity, goal)
    start = (1 - _GRACE / 2) * optimum + _GRACE / 2 * _inside(gain > 0, gpus, capacity)
    # The second limit matters only where a goal is smaller than the solver's tolerance.
    floor = np.minimum((1 - _GRACE) * level * goal, (1 - _GRACE / 4) * (gain * start).sum(axis=1))
    face = _Face(gain=gain, floor=floor, gpus=np.where(gain > 0, gpus[:, None], 0.0), capacity=capacity)
    # Cutting off the noise lets ties be ties.
    return np.floor(_centre(face, start) * _DIGITS) / _DIGITS


def _optimum(
    gain: FloatArray, gpus: FloatArray, capacity: FloatArray, goal: FloatArray | None
) -> tuple[FloatArray, float]:
    """X and the largest sum of gain × X; or, given goals, the largest z such that each job's sum is goal × z."""
    try:
        from scipy import sparse
        from scipy.optimize import linprog
    except ImportError:
        raise MissingExtra(
            "time shares need a solver of linear programmes", hint="pip install stretto[solver]"
        ) from None
    job, pool = np.nonzero(gain > 0)
    n, m, k = len(gpus), len(job), len(capacity)
    value, column = gain[job, pool], np.arange(m)
    time = sparse.coo_array((np.ones(m), (job, column)), shape=(n, m))
    used = sparse.coo_array((gpus[job], (pool, column)), shape=(k, m))
    rows, limit, cost = sparse.vstack((time, used)), np.concatenate((np.ones(n), capacity)), -value
    if goal is not None:
        short = sparse.coo_array((-value, (job, column)), shape=(n, m))
        level = sparse.coo_array(np.concatenate((np.zeros(n + k), goal))[:, None])
        rows, limit = sparse.hstack((sparse.vstack((rows, short)), level)), np.concatenate((limit, np.zeros(n)))
        cost = np.append(np.zeros(m), -1.0)
    # Many jobs alike make the simplex crawl; the interior-point method does not mind.
    answer = linprog(cost, A_ub=rows.tocsr(), b_ub=limit, method="highs-ipm")  # type: ignore[call-overload]
    if answer.x is None:
        raise PolicyError(f"the linear programme for {n} jobs was not solved: {answer.message}")
    share = np.zeros(gain.shape)
    share[job, pool] = np.clip(answer.x[:m], 0.0, 1.0)
    return share, -float(answer.fun)


def _inside(usable: BoolArray, gpus: FloatArray, capacity: FloatArray) -> FloatArray:
    """Some X away from every limit: half of what all would get if the scarcest pool were cut evenly."""
    pools = usable.any(axis=0)
    even = min(1.0, float((capacity / (usable * gpus[:, None]).sum(axis=0).clip(1e-9))[pools].min()))
    share: FloatArray = usable * (even / 2 / usable.sum(axis=1, keepdims=True))
    return share


class _Face(msgspec.Struct, frozen=True, kw_only=True):
    """All X that give every job its floor at least."""

    gain: FloatArray
    floor: FloatArray
    gpus: FloatArray
    """[job, pool], 0 where the job cannot go."""
    capacity: FloatArray

    def distances(self, share: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """To zero, to all of the job's time, to its floor and to what the pool has; 1 where there is no limit."""
        zero = np.where(self.gpus > 0, share, 1.0)
        above = (self.gain * share).sum(axis=1) - self.floor
        room = self.capacity - (self.gpus * share).sum(axis=0)
        return zero, 1 - share.sum(axis=1), above, np.where(self.gpus.any(axis=0), room, 1.0)

    def height(self, share: FloatArray) -> float:
        """The sum of the logarithms of all distances: largest at the centre, -inf outside."""
        distances = self.distances(share)
        inside = all((distance > 0).all() for distance in distances)
        return float(sum(np.log(distance).sum() for distance in distances)) if inside else -math.inf

    def newton(self, share: FloatArray) -> tuple[FloatArray, float]:
        """The step to the centre as the second order sees it, and the rise in height it promises, twice.

        The second derivative is a block per job and one rank per pool (Woodbury), so no large matrix is needed.
        """
        zero, time, above, room = self.distances(share)
        here = (self.gpus > 0).astype(np.float64)
        slope = here / zero - here / time[:, None] + self.gain / above[:, None] - self.gpus / room
        block = np.einsum("jt,ts->jts", 1 / zero**2, np.eye(len(room)))
        block += np.einsum("jt,js->jts", here / time[:, None], here / time[:, None])
        block += np.einsum("jt,js->jts", self.gain / above[:, None], self.gain / above[:, None])
        inverse = np.linalg.inv(block)
        alone = np.einsum("jts,js->jt", inverse, slope)
        spread = inverse * self.gpus[:, None, :]
        price = np.linalg.solve(
            np.diag(room**2) + np.einsum("jt,jts->ts", self.gpus, spread), (self.gpus * alone).sum(axis=0)
        )
        step = alone - spread @ price
        return step, float((slope * step).sum())


def _centre(face: _Face, share: FloatArray) -> FloatArray:
    """The X of the face with the largest product of all distances, by Newton's method from one inside."""
    for _ in range(_STEPS):
        step, rise = face.newton(share)
        size, height = 1.0, face.height(share)
        # Close to the centre a whole step is safe, and squares the error.
        while rise > 0.01 and size > 1e-12 and not face.height(share + size * step) >= height + 0.1 * size * rise:
            size /= 2
        share = share + size * step
        if not rise > 1e-15:
            break
    return share
