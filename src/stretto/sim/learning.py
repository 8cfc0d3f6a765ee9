"""What policies are told of jobs where nobody knows it beforehand: learned curves and estimated lengths.

A `Learner` stands between the world and the policy. It is shown every snapshot as it truly is, notes what can be seen
of it, and hands on one that holds beliefs instead of truths (`core.estimate` makes them):

- `curves=learned`: a size at which a job has run for `observe_s` is measured, with what its neighbours do to it. What
  is believed of it (`core.estimate.belief`) comes from its own measurements and from those of finished jobs of its
  class that train the same model (that have the same curve in the trace). No gain is promised beyond twice the widest
  size that was measured, so policies that look for gain explore by doubling. The policy is asked again when a new size
  was measured.
- `lengths=estimated`: the size of a job is estimated from the finished jobs of its class and what its user wrote down
  (resources, model, requirements) or could see at submission (the time, the jobs beside it), and corrected by what it
  has outlived.

A job of one size keeps its true curve: there is nothing to choose, and its length is stated in seconds anyway.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from stretto.core import exploring
from stretto.core.estimate import belief
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve, Window
from stretto.core.estimate.history import ClassHistory, Length, learn, lengths
from stretto.core.estimate.remaining import left_of_all
from stretto.core.snapshot import FloatArray, IntArray, Snapshot
from stretto.sim.world import Settings

_AT_ONCE = 100
"""Measurements that are taken over at a time; more would not change the curve."""
_AGAIN = 4
_WINDOW_STEPS = 8
"""Steps of one measurement, as live."""
_SETTLED_STEPS = 64.0
"""After so many steps at a size more of them change little."""
_EVERYONE = -1
_HAIR = 1e-6
"""Of a measurement: one that ends now is complete, whatever the rounding of times says."""


def learner(settings: Settings) -> Learner | None:
    """What stands between this world and its policy; None where the policy is told the truth."""
    return Learner(settings) if settings.curves == "learned" or settings.lengths == "estimated" else None


class _Job(msgspec.Struct, kw_only=True):
    """What is known of one active job."""

    klass: int
    model: int
    features: dict[str, float | str]
    low: int
    high: int
    is_service: bool
    fixed: bool
    """Its true curve is told."""
    pause_s: float
    """What a start or a resize costs it, at most."""
    curve: int = -1
    """Row of the truth that holds now."""
    rates: FloatArray
    """[pool, workers] as believed now, made again when `stale`."""
    stale: bool
    measured: dict[int, Curve] = {}
    """By pool."""
    shift: float = math.nan
    """log(steps of the measurements / steps of the trace): of the first measurement a step takes as long as live."""
    shown: dict[int, Curve] = {}
    """`measured`, in steps of the measurements."""
    useless: frozenset[int] = frozenset()
    """Pools on which it was seen to make no progress."""
    since_s: float = math.nan
    """When it got the workers that are being measured; how often they were, and the speed found."""
    taken: int = 0
    rate: float = 0.0
    total: Length | None = None
    """In seconds on its minimum of workers; None: to be estimated (again)."""
    steps: float = 0.0
    """In all, for history: policies see it only when lengths are known."""


class Learner:
    """The state of one run: what was seen of the active jobs, and what is left of the finished ones."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = np.random.default_rng(settings.seed)
        self.jobs: dict[int, _Job] = {}
        self.classes: dict[int, ClassHistory] = {}
        """Sizes, by class."""
        self.models: dict[tuple[int, int, int], ClassHistory] = {}
        """Curves, by class, model and pool."""
        self._numbers: list[int] = []
        self._table = np.empty(0)
        self._falls = False

    def seen(self, view: Snapshot, speed: FloatArray) -> Snapshot:
        """The snapshot as the policy gets to see it. `speed`: steps/s that each job really makes now."""
        numbers = view.job.tolist()
        self._meet(view, numbers)
        believed: dict[str, Any] = {}
        if self.settings.curves == "learned":
            self._measure(view, speed)
            rates = self._rates(numbers)
            believed = {"rates": rates, "falls": self._falls, "curve": np.arange(len(view)), "spread_rates": None}
            if self.settings.explore:
                believed |= self._exploring(view, numbers)
        if self.settings.lengths == "estimated":
            unit = msgspec.structs.replace(view, **believed).rate(view.min_workers)
            believed |= self._left(view, np.maximum(unit, 1e-12))
        return msgspec.structs.replace(view, **believed)

    def ended(self, numbers: IntArray) -> None:
        """These jobs have finished: from now on they are history."""
        for job in [self.jobs.pop(number) for number in numbers.tolist() if number in self.jobs]:
            if job.is_service:
                continue
            size_s = job.steps / max(float(job.rates[0, min(job.low, job.rates.shape[1] - 1)]), 1e-12)
            for klass in (job.klass, _EVERYONE):
                self.classes[klass] = learn(self._class(klass), job.features, size_s)
            for pool, curve in job.measured.items():
                for key in ((job.klass, job.model, pool), (_EVERYONE, _EVERYONE, pool)):
                    self.models[key] = learn(self.models.get(key, ClassHistory()), {}, math.nan, curve)
            for other in self.jobs.values():
                alike = (other.klass, other.model) == (job.klass, job.model)
                other.stale |= not other.fixed and (alike or not other.measured)
                if other.klass == job.klass or not self._class(other.klass).runs:
                    other.total = None

    def next_s(self, numbers: IntArray, workers: IntArray, pool: IntArray, changed_s: FloatArray) -> float:
        """When a job will have been measured at a size of which little is known; inf if none will."""
        soonest_s = math.inf
        if self.settings.curves != "learned":
            return soonest_s
        for j in np.flatnonzero(workers).tolist():
            job = self.jobs.get(int(numbers[j]))
            if job is None or job.fixed:
                continue
            curve = job.measured.get(int(pool[j]), Curve())
            steps = dict(zip(curve.workers, curve.count, strict=True)).get(int(workers[j]), 0.0)
            if steps < _SETTLED_STEPS:
                taken = job.taken if job.since_s == changed_s[j] else 0
                windows = _AGAIN * taken if taken else 1
                soonest_s = min(soonest_s, self._due_s(job, float(changed_s[j]), windows))
        return soonest_s

    def _class(self, klass: int) -> ClassHistory:
        return self.classes.get(klass, ClassHistory())

    def _due_s(self, job: _Job, changed_s: float, windows: int = 1) -> float:
        """When so many measurements are complete, after the pause of a start or a resize."""
        return changed_s + job.pause_s + windows * self.settings.observe_s

    def _meet(self, view: Snapshot, numbers: list[int]) -> None:
        """Take in newcomers; forget those that were turned away."""
        for gone in self.jobs.keys() - set(numbers):
            del self.jobs[gone]
        rigid = view.is_service | (view.min_workers == view.max_workers)
        for j, number in enumerate(numbers):
            if number not in self.jobs:
                fixed = bool(rigid[j]) or self.settings.curves != "learned"
                self.jobs[number] = _Job(
                    klass=int(view.klass[j]),
                    model=int(view.curve[j]),
                    features=_features(view, j),
                    low=int(view.min_workers[j]),
                    high=int(view.max_workers[j]),
                    is_service=bool(view.is_service[j]),
                    fixed=fixed,
                    pause_s=float(max(view.start_s[j], view.resize_s[j])),
                    rates=view.rates[:, view.curve[j]],
                    stale=not fixed,
                    steps=float(view.done[j] + view.remaining[j]),
                )
            elif view.curve[j] != self.jobs[number].curve and self.jobs[number].fixed:
                # Its next phase has another speed.
                self.jobs[number].rates, self._numbers = view.rates[:, view.curve[j]], []
            self.jobs[number].curve = int(view.curve[j])

    # Curves.

    def _measure(self, view: Snapshot, speed: FloatArray) -> None:
        """Note the speed of every job that has run on its workers for long enough.

        It is looked at again each time it has been seen for four times as long, or when the speed has changed.
        """
        for j in np.flatnonzero((view.workers > 0) & ~view.is_service).tolist():
            job, changed_s, rate = self.jobs[int(view.job[j])], float(view.changed_s[j]), float(speed[j])
            if job.fixed or view.now_s < self._due_s(job, changed_s):
                continue
            if job.since_s != changed_s:
                job.since_s, job.taken = changed_s, 0
            times = max(1, int((view.now_s - changed_s - job.pause_s) / self.settings.observe_s + _HAIR))
            if times >= _AGAIN * job.taken or rate != job.rate:
                self._note(job, int(view.pool[j]), int(view.workers[j]), rate, max(1, times - job.taken), view.now_s)
                job.taken, job.rate, job.stale = times, rate, True

    def _note(self, job: _Job, pool: int, workers: int, rate: float, times: int, now_s: float) -> None:
        if rate <= 0:
            job.useless |= {pool}
            return
        curve = job.measured.get(pool, Curve())
        spread = self.settings.observe_sd * math.sqrt(_WINDOW_STEPS)
        for noise in self._noise(min(times, _AT_ONCE)):
            step_s = noise / rate
            window = Window(workers, _WINDOW_STEPS, step_s, spread * step_s, now_s - self.settings.observe_s, now_s)
            curve = curves.take_in(curve, window)
        job.measured = {**job.measured, pool: curve}
        if math.isnan(job.shift):
            job.shift = math.log(rate * self.settings.observe_s / _WINDOW_STEPS)
        job.shown = {**job.shown, pool: _in_steps(curve, job.shift)}

    def _noise(self, times: int) -> list[float]:
        sd = self.settings.observe_sd
        factors: list[float] = np.exp(sd * self.random.standard_normal(times)).tolist() if sd else [1.0] * times
        return factors

    def _rates(self, numbers: list[int]) -> FloatArray:
        """The table of all jobs' curves, a row each; the same object as before if nothing was learned."""
        jobs = [self.jobs[number] for number in numbers]
        if numbers == self._numbers and not any(job.stale for job in jobs):
            return self._table
        for job in jobs:
            if job.stale:
                job.rates, job.stale = self._believed(job), False
        table = np.empty((len(jobs[0].rates), len(jobs), max(job.rates.shape[1] for job in jobs)))
        for j, job in enumerate(jobs):
            end = job.rates.shape[1]
            table[:, j, :end], table[:, j, end:] = job.rates, job.rates[:, -1:]
        self._numbers, self._table = numbers, table
        self._falls = bool((np.diff(table, axis=2) < 0).any())
        return table

    def _exploring(self, view: Snapshot, numbers: list[int]) -> dict[str, Any]:
        """What the cycle needs to try sizes, as the live system tells it."""
        jobs = [self.jobs[number] for number in numbers]
        pools = np.maximum(view.pool, 0).tolist()
        return {
            "measured": {n: job.shown[p] for n, job, p in zip(numbers, jobs, pools, strict=True) if p in job.shown},
            "explores": np.array([not job.fixed for job in jobs], np.bool_),
            "guess": np.array([self._guess(job, p) for job, p in zip(jobs, pools, strict=True)], np.int64),
        }

    def _guess(self, job: _Job, pool: int) -> int:
        """Where its class was fastest; its minimum, where nobody knows."""
        seen = curves.measured(self._curve(job.klass, job.model, pool))
        return max(job.low, min(job.high, exploring.best(seen).workers)) if seen else job.low

    def _believed(self, job: _Job) -> FloatArray:
        pools = range(len(job.rates))
        return belief.believed(
            [job.measured.get(pool, Curve()) for pool in pools],
            [self._curve(job.klass, job.model, pool) for pool in pools],
            job.low,
            job.high,
            first=job.low,
            strangers=[self._curve(_EVERYONE, _EVERYONE, pool) for pool in pools],
            useless=job.useless,
        )

    def _curve(self, klass: int, model: int, pool: int) -> Curve:
        return self.models.get((klass, model, pool), ClassHistory()).curve

    # Lengths.

    def _left(self, view: Snapshot, unit: FloatArray) -> dict[str, FloatArray]:
        """Work left and its uncertainty. `unit` is steps/s on the minimum, as the policy believes."""
        jobs = [self.jobs[number] for number in view.job.tolist()]
        self._estimate(jobs)
        totals = [job.total for job in jobs]
        mean_log, sd_log = (np.array([getattr(total, name) for total in totals]) for name in ("mean_log", "sd_log"))
        left_s, sd = left_of_all(mean_log, sd_log, view.done / unit)
        return {"remaining": left_s * unit, "remaining_sd": sd}

    def _estimate(self, jobs: list[_Job]) -> None:
        """Estimate the sizes of newcomers, and of all of a class of which another one has finished."""
        asking: dict[int, list[_Job]] = {}
        for job in jobs:
            if job.total is None:
                klass = job.klass if self._class(job.klass).runs else _EVERYONE
                asking.setdefault(klass, []).append(job)
        for klass, some in asking.items():
            for job, total in zip(some, lengths(self._class(klass), [job.features for job in some]), strict=True):
                job.total = total


def _in_steps(curve: Curve, shift: float) -> Curve:
    """The curve in steps of which a measurement has as many as it counts: those of a trace may be hours long."""
    return msgspec.structs.replace(curve, mean=tuple(mean + shift for mean in curve.mean))


def _features(view: Snapshot, j: int) -> dict[str, float | str]:
    """What is known of a job when it is submitted."""
    features: dict[str, float | str] = {
        "gpus": int(view.requested[j] * view.width[j]),
        "least": int(view.min_workers[j]),
        "most": int(view.max_workers[j]),
        "model": f"model {view.curve[j]}",
        "priority": int(view.priority[j]),
        "submitted": float(view.submit_s[j]),
        "concurrent": len(view),
    }
    if math.isfinite(view.deadline_s[j]):
        features["allowed_s"] = float(view.deadline_s[j] - view.submit_s[j])
    return features
