"""The time-priced dual bound on the mean completion time of elastic jobs.

Put a price λ(t) ≥ 0 on every GPU-second. Each job then minimises its completion time plus what it pays, alone; the sum
of these optima, less what all GPUs earn, is below the total completion time of every schedule, whatever the prices
(Lagrangian duality; clairvoyant, free resizing, concave hulls of the speed-ups). Good prices make the bound tight.

For a job with w steps to do, ending at C costs at least  C − r + max over μ of (μ w − ∫ from r to C of h(μ, λ(t)) dt),
h(μ, λ) = max over n of (μ T(n) − λ n). Prices are constant on bins, so for one μ the value is linear in C on a bin and
its smaller end bounds it from below; any set of μ gives a valid bound. Jobs of one curve share the integrals.

Prices start from the activity of the trace under equal shares; then they rise where the jobs' answers ask for more
than there is and fall where they ask for less, multiplicatively, with momentum. The best bound seen is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from stretto.core.hull import Hulls, hulls
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray
from stretto.errors import UsageError
from stretto.sim.fair import fair_finish
from stretto.sim.trace import Trace

_WORTHS = 320
_SPAN = 300.0


class Prices(msgspec.Struct, frozen=True):
    """A price per GPU-second on each bin; bin i covers [edge[i], edge[i+1])."""

    edge_s: FloatArray
    price: FloatArray


def average_jct(
    trace: Trace,
    gpus: float,
    ended: BoolArray | None = None,
    *,
    rounds: int = 40,
    bin_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """The best bound on the mean completion time that so many rounds of pricing find; nan unless all jobs ended."""
    if ended is not None and not ended.all():
        return math.nan
    if trace.phases or len(trace.pools) > 1 or trace.services or (trace.width != GPU).any():
        raise UsageError(
            "the dual bound is for one device type, whole GPUs per worker and one speed-up curve per job",
            hint="leave it out for this trace",
        )
    groups = _groups(trace)
    prices = _first_prices(trace, gpus, bin_s)
    best, momentum = -math.inf, np.zeros(len(prices.price))
    total = np.diff(prices.edge_s)
    for turn in range(rounds):
        value, use = _answers(trace, groups, prices)
        best = max(best, (value - gpus * float(prices.price @ total)) / len(trace))
        excess = np.clip(np.log(np.maximum(use, 1e-3 * gpus) / gpus), -1.0, 1.0)
        momentum = 0.5 * momentum + 0.5 * excess
        step = 0.4 / (1 + turn / 6)
        prices = Prices(prices.edge_s, np.maximum(prices.price * np.exp(step * momentum), 1e-9))
        if progress is not None:
            progress(turn + 1, rounds)
    return best


def _first_prices(trace: Trace, gpus: float, bin_s: float) -> Prices:
    end = fair_finish(trace, int(gpus * GPU))
    edge = np.arange(0.0, float(end.max()) + 2 * bin_s, bin_s)
    active = np.zeros(len(edge))
    np.add.at(active, (trace.submit_s / bin_s).astype(np.int64), 1)
    np.add.at(active, np.minimum((end / bin_s).astype(np.int64) + 1, len(edge) - 1), -1)
    return Prices(edge, np.maximum(np.cumsum(active)[:-1], 0.02) / gpus)


def _groups(trace: Trace) -> list[tuple[IntArray, Hulls]]:
    """Jobs of one curve and maximum, with the hull of their curve up to it. Minimums are left out: a relaxation."""
    kinds, kind = np.unique(np.stack((trace.curve, trace.max_workers)), axis=1, return_inverse=True)
    return [
        (np.flatnonzero(kind.reshape(-1) == k), hulls(trace.rates[0, curve : curve + 1, : most + 1]))
        for k, (curve, most) in enumerate(kinds.T.tolist())
    ]


def _answers(trace: Trace, groups: list[tuple[IntArray, Hulls]], prices: Prices) -> tuple[float, FloatArray]:
    """The sum of the jobs' optima (a lower bound on it), and the GPUs they ask for on each bin."""
    value, use = 0.0, np.zeros(len(prices.price))
    for jobs, hull in groups:
        shared = _Curve(hull.workers[0], hull.rate[0], prices)
        got, asked = shared.answer(trace.submit_s[jobs], trace.work[jobs])
        value += got
        use += asked
    return value, use


class _Curve:
    """Everything the jobs of one curve share: for each worth μ of a step, the integrals over time."""

    def __init__(self, workers: IntArray, rate: FloatArray, prices: Prices) -> None:
        self.n, self.rate = workers.astype(np.float64), rate
        self.prices = prices
        slope = np.diff(self.rate) / np.maximum(np.diff(self.n), 1e-12)
        self.slope = np.where(np.diff(self.n) > 0, slope, 0.0)
        usual = float(np.median(prices.price)) / max(float(self.slope[0]), 1e-12)
        dearest = float(prices.price.max()) / max(float(self.slope[self.slope > 0].min()), 1e-12)
        self.worth = np.geomspace(usual / _SPAN, max(dearest * 1.5, usual * _SPAN), _WORTHS)
        self._integrate()

    def _integrate(self) -> None:
        length = np.diff(self.prices.edge_s)
        price = self.prices.price
        # At worth μ a stretch of the hull is used where μ × slope exceeds the price.
        level = (self.slope[None, :, None] * self.worth[:, None, None] > price[None, None, :]).sum(axis=1)
        self.asked = self.n[level]
        rate = self.rate[level]
        gain = self.worth[:, None] * rate - price[None, :] * self.asked
        zero = np.zeros((len(self.worth), 1))
        self.work_by = np.concatenate((zero, np.cumsum(rate * length, axis=1)), axis=1)
        self.gain_by = np.concatenate((zero, np.cumsum(gain * length, axis=1)), axis=1)

    def answer(self, submit: FloatArray, work: FloatArray) -> tuple[float, FloatArray]:
        """Lower bounds on the optima of these jobs, summed, and the GPUs of their best answers per bin."""
        edge = self.prices.edge_s
        use = np.zeros(len(edge) - 1)
        total = 0.0
        first = np.searchsorted(edge, submit, side="right") - 1
        part = (submit - edge[first]) / (edge[first + 1] - edge[first])
        gain_at = self.gain_by[:, first] + part * (self.gain_by[:, first + 1] - self.gain_by[:, first])
        work_at = self.work_by[:, first] + part * (self.work_by[:, first + 1] - self.work_by[:, first])
        for j in range(len(submit)):
            total += self._optimum(submit[j], work[j], int(first[j]), gain_at[:, j], work_at[:, j], use)
        return total, use

    def _optimum(
        self, submit: float, work: float, first: int, gain_at: FloatArray, work_at: FloatArray, use: FloatArray
    ) -> float:
        edge = self.prices.edge_s
        if work <= 0:
            return 0.0
        # An answer that can be carried out, for every worth: end as soon as the work is done. The best one bounds
        # how late an end is worth looking at.
        target = work_at + work
        feasible = np.flatnonzero(self.work_by[:, -1] >= target)
        if not len(feasible):
            return 0.0
        ends = np.array([np.searchsorted(self.work_by[m], target[m]) for m in feasible])
        before = ends - 1
        inside = (target[feasible] - self.work_by[feasible, before]) / np.maximum(
            self.work_by[feasible, ends] - self.work_by[feasible, before], 1e-300
        )
        end_s = edge[before] + inside * (edge[ends] - edge[before])
        gained = self.gain_by[feasible, before] + inside * (
            self.gain_by[feasible, ends] - self.gain_by[feasible, before]
        )
        cost = end_s - submit + self.worth[feasible] * work - (gained - gain_at[feasible])
        best = int(np.argmin(cost))
        self._note_use(int(feasible[best]), submit, float(end_s[best]), first, int(before[best]), use)
        return self._rigorous(submit, work, first, gain_at, float(cost[best]))

    def _note_use(self, m: int, submit: float, end_s: float, first: int, last: int, use: FloatArray) -> None:
        edge = self.prices.edge_s
        use[first : last + 1] += self.asked[m, first : last + 1]
        use[first] -= self.asked[m, first] * (submit - edge[first]) / (edge[first + 1] - edge[first])
        use[last] -= self.asked[m, last] * (edge[last + 1] - end_s) / (edge[last + 1] - edge[last])

    def _rigorous(self, submit: float, work: float, first: int, gain_at: FloatArray, ceiling: float) -> float:
        """The least, over all bins in which the job could end, of the best bound that any worth gives there."""
        edge = self.prices.edge_s
        stop = min(len(edge) - 1, int(np.searchsorted(edge, submit + ceiling, side="right")) + 1)
        moments = edge[first : stop + 1].copy()
        moments[0] = submit
        gained = self.gain_by[:, first : stop + 1] - gain_at[:, None]
        gained[:, 0] = 0.0
        value = (moments - submit)[None, :] + self.worth[:, None] * work - gained
        on_bin = np.minimum(value[:, :-1], value[:, 1:]).max(axis=0)
        # Ending after the last moment looked at takes longer than the ceiling, or goes on after the last bin.
        return max(0.0, min(float(on_bin.min()), ceiling, float(edge[-1]) - submit))
