"""The simulator started from a live snapshot: when will each waiting job start, and each running one end?

The cycle is shown what the loop shows it: the same jobs under the same numbers, on the same nodes, at the same time,
with what it remembers of them. So what starts at once here is what starts in the loop's next decision. From there on
jobs do what is expected of them: what is left of them is what the snapshot says, else what finished jobs suggest, but
of a length that the snapshot does not say the cycle is told nothing here either. Sizes that are explored turn out as
they are believed. What would lose work by a stop now is taken not to save any before it ends, and the load of services
stays what it is.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec
import numpy as np

from stretto.core import cycle
from stretto.core.agenda import Agenda
from stretto.core.cycle import CycleState
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.core.estimate.remaining import expected_steps
from stretto.core.policy import Policy
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot
from stretto.errors import PolicyError
from stretto.sim.general import Engine
from stretto.sim.trace import ELASTIC, RESTART, Load, Trace
from stretto.sim.world import Settings

_PATIENCE = 100
"""Decisions that change nothing while nobody makes progress, after which nothing is expected to happen any more."""
_LEAST_WORK = 1e-9
_NO_RESIZE_S = 1e6
_WINDOW_STEPS, _SHORTEST_S, _LONGEST_S = 8.0, 0.3, 20.0
"""Of a measurement, as live; a job that tells of its steps does so soon enough not to be taken for silent."""
_SILENT_S = 30.0
_SURE_STEPS = 64.0
"""A size that was measured is known."""


class Forecast(msgspec.Struct, frozen=True):
    """Seconds from now, in the order of the snapshot's jobs; nan where nobody can say: of what is rejected or
    never starts, and of the ends of services."""

    start_s: FloatArray
    """0 for those that run."""
    end_s: FloatArray


class Guessed(msgspec.Struct, frozen=True):
    """Which times of a forecast hang on a length that nobody knows."""

    start: BoolArray
    end: BoolArray


def guessed(found: Forecast, unknown: BoolArray, resizable: BoolArray) -> Guessed:
    """`unknown`: jobs that are of no known length; `resizable`: those that may be given more or fewer workers.

    A job that starts later than one of unknown length did may have waited for its room, and one that can be resized,
    and shares its time with one, may get its room. That is more than really depends on it, and never less.
    """
    first_s = float(found.start_s[unknown & ~np.isnan(found.start_s)].min(initial=math.inf))
    start: BoolArray = found.start_s > max(first_s, 0.0)
    end: BoolArray = unknown | start | (resizable & (found.end_s > first_s))
    return Guessed(start, end & ~np.isnan(found.end_s))


def forecast(
    view: Snapshot, policy: Policy, state: CycleState | None = None, rules: cycle.Settings | None = None
) -> Forecast:
    """What will happen if nothing else comes."""
    engine = _engine(view, policy, state or CycleState(), rules or cycle.Settings())
    with contextlib.suppress(PolicyError):
        # Sometimes nothing more will happen as things are (a drained cluster, say): what did until then is known.
        engine.run()
    jobs = engine.jobs
    start_s = jobs.tally.start_s.copy()
    start_s[jobs.row] = jobs.started_s
    return Forecast(np.where(view.workers > 0, 0.0, start_s - view.now_s), jobs.tally.finish_s - view.now_s)


def _engine(view: Snapshot, policy: Policy, state: CycleState, rules: cycle.Settings) -> Engine:
    """A run that goes on from here."""
    if view.placed.shape[1] != len(view.nodes.name):
        rules = msgspec.structs.replace(rules, placement="")
    engine = Engine(_trace(view), view.pools, view.nodes, policy, Settings(placement=rules.placement))
    engine.machines.capacity = view.capacity
    engine.state, engine.history, engine.rules = state, view.history, rules
    engine.now_s, engine.agenda, engine.learner = view.now_s, Agenda(wake_s=view.now_s), _Told(view)
    engine.patience = _PATIENCE
    jobs, n = engine.jobs, len(view)
    jobs.admit(view.now_s)
    jobs.workers, jobs.pool = view.workers.copy(), view.pool.copy()
    if rules.placement:
        jobs.placed = view.placed.copy()
    jobs.gpu_s, jobs.ran_s, jobs.waited_s = view.gpu_s.copy(), view.ran_s.copy(), view.waited_s.copy()
    jobs.restarts, jobs.changed_s, jobs.anchor_s = view.restarts.copy(), *np.full((2, n), view.now_s)
    # Of those that wait the next start is asked for, also if they ran before.
    jobs.started_s = np.where(view.workers > 0, view.now_s, np.nan)
    jobs.refresh()
    if view.lost_s is not None and jobs.stakes is not None:
        jobs.unsaved_s = np.where(view.workers > 0, view.lost_s, 0.0)
        jobs.unsaved = jobs.unsaved_s * jobs.rate
    return engine


class _Told:
    """Stands between the simulated jobs and the cycle: it is told what it is live, and no more."""

    def __init__(self, now: Snapshot) -> None:
        self._now = now
        self._window_s = np.maximum(now.start_s, np.where(now.resize_s < _NO_RESIZE_S, now.resize_s, 0.0))
        self._measured: dict[tuple[int, int], Curve] = {}
        """By row and pool."""
        for j, number in enumerate(now.job.tolist()):
            if now.measured and number in now.measured:
                self._measured[j, max(int(now.pool[j]), 0)] = now.measured[number]
        silent = (now.workers > 0) & (now.ran_s > _SILENT_S)
        self._silent = {
            j for j in np.flatnonzero(silent).tolist() if (j, max(int(now.pool[j]), 0)) not in self._measured
        }

    def seen(self, view: Snapshot, speed: FloatArray) -> Snapshot:
        """The snapshot as it would be live. A simulated job's number is its row in the snapshot of now."""
        now, row = self._now, view.job
        as_before = (view.workers == now.workers[row]) & (view.restarts == now.restarts[row])
        known = np.where(now.remaining[row] == 0, 0.0, view.remaining)
        return msgspec.structs.replace(
            view,
            job=now.job[row],
            submit_s=now.submit_s[row],
            fixed_milli=now.fixed_milli[row],
            resize_s=now.resize_s[row],
            reach=None if now.reach is None else now.reach[row],
            remaining=np.where(np.isnan(now.remaining[row]), np.nan, known),
            remaining_sd=now.remaining_sd[row],
            done=now.done[row] + view.done,
            started_s=np.where(np.isnan(now.started_s[row]), view.started_s, now.started_s[row]),
            changed_s=np.where(as_before, now.changed_s[row], view.changed_s),
            **self._at_stake(view),
            **self._exploring(view, speed),
        )

    def ended(self, numbers: IntArray) -> None:
        gone = set(numbers.tolist())
        self._measured = {key: curve for key, curve in self._measured.items() if key[0] not in gone}

    def next_s(self, numbers: IntArray, workers: IntArray, pool: IntArray, changed_s: FloatArray) -> float:
        """When a size will have been measured that was not before; inf: none will."""
        if self._now.explores is None:
            return math.inf
        runs = self._now.explores[numbers] & (workers > 0)
        columns = (column[runs].tolist() for column in (numbers, workers, pool, changed_s))
        return min(
            (
                self._due_s(j, size, p, since_s)
                for j, size, p, since_s in zip(*columns, strict=True)
                if size not in self._curve(j, p).workers
            ),
            default=math.inf,
        )

    def _at_stake(self, view: Snapshot) -> dict[str, Any]:
        now, row = self._now, view.job
        if now.lost_s is None:
            return {}
        return {
            "lost_s": np.zeros(len(view)) if view.lost_s is None else view.lost_s,
            "fragile": None if now.fragile is None else now.fragile[row],
            "unproven": None if now.unproven is None else now.unproven[row] & self._unseen(view),
            "preemptible": None if now.preemptible is None else now.preemptible[row],
        }

    def _unseen(self, view: Snapshot) -> BoolArray:
        """Who was not yet seen to keep its progress. Whoever runs here is, but for those that lose work by a stop now:
        they are taken to stay as they are."""
        now, row = self._now, view.job
        unseen: BoolArray = np.isnan(view.started_s) | (view.now_s <= now.now_s)
        return unseen if now.lost_s is None else unseen | (now.lost_s[row] > 0)

    def _exploring(self, view: Snapshot, speed: FloatArray) -> dict[str, Any]:
        now, row = self._now, view.job
        if now.explores is None or now.measured is None:
            return {"explores": now.explores if now.explores is None else now.explores[row]}
        explores = now.explores[row]
        for i in np.flatnonzero(explores & (view.workers > 0) & (speed > 0)).tolist():
            self._measure(int(row[i]), int(view.workers[i]), int(view.pool[i]), float(view.changed_s[i]), view.now_s)
        # Few of those that wait were ever measured.
        at = np.full(len(now), -1, np.int64)
        at[row] = np.maximum(view.pool, 0)
        pools, numbers = at.tolist(), now.job
        measured = {int(numbers[j]): curve for (j, p), curve in self._measured.items() if pools[j] == p}
        return {"explores": explores, "measured": measured, "guess": None if now.guess is None else now.guess[row]}

    def _measure(self, j: int, size: int, pool: int, since_s: float, now_s: float) -> None:
        """As it is believed to be."""
        curve = self._curve(j, pool)
        if size not in curve.workers and now_s >= self._due_s(j, size, pool, since_s):
            self._measured[j, pool] = curves.observe(curve, size, 1 / self._rate(j, size, pool), _SURE_STEPS)

    def _due_s(self, j: int, size: int, pool: int, since_s: float) -> float:
        """When a job that has had this size since then will have been measured there."""
        rate = self._rate(j, size, pool)
        if rate <= 0 or j in self._silent:
            return math.inf
        return since_s + float(self._window_s[j]) + min(max(_WINDOW_STEPS / rate, _SHORTEST_S), _LONGEST_S)

    def _rate(self, j: int, size: int, pool: int) -> float:
        rates = self._now.rates[pool, self._now.curve[j]]
        return float(rates[min(size, len(rates) - 1)])

    def _curve(self, j: int, pool: int) -> Curve:
        return self._measured.get((j, pool), _NOTHING)


_NOTHING = Curve()


def _trace(view: Snapshot) -> Trace:
    n = len(view)
    serves = view.is_service.tolist()
    return Trace(
        name="now",
        ids=tuple(str(number) for number in view.job.tolist()),
        submit_s=np.full(n, view.now_s),
        requested=view.requested,
        min_workers=view.min_workers,
        max_workers=view.max_workers,
        work=np.maximum(expected_steps(view), _LEAST_WORK),
        curve=view.curve,
        rates=view.rates,
        pools=view.pools,
        duration_s=np.where(view.is_service, math.inf, math.nan),
        deadline_s=view.deadline_s,
        priority=view.priority,
        klass=view.klass,
        classes=tuple(str(i) for i in range(int(view.klass.max(initial=0)) + 1)),
        width=view.width,
        demand=view.demand,
        step=view.step,
        services=tuple(_load(view, j) if serves[j] else None for j in range(n)) if any(serves) else (),
        start_s=view.start_s,
        # Where a resize is out of the question its cost is no number of seconds.
        resize_s=np.where(view.resize_s < _NO_RESIZE_S, view.resize_s, view.start_s),
        **_stops(view),
    )


def _load(view: Snapshot, j: int) -> Load:
    return Load(np.array([-math.inf]), view.wanted[j : j + 1])


def _stops(view: Snapshot) -> dict[str, Any]:
    """What a stop would cost each job."""
    found: dict[str, Any] = {}
    if view.lost_s is not None:
        loses = view.lost_s > 0 if view.fragile is None else view.fragile | (view.lost_s > 0)
        found["level"] = np.where(loses, RESTART, ELASTIC)
        found["checkpoint_s"] = np.where(loses, math.inf, 0.0)
    if view.preemptible is not None:
        found["preemptible"] = view.preemptible.astype(np.int64)
    return found
