"""The active jobs of a run, as columns: how far each has come, and what it leaves behind.

A job's finish time is computed once per change of its workers and never drifts. Columns that snapshots show are
replaced, never written: a snapshot stays what it was.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray
from stretto.sim import contention, levels
from stretto.sim.trace import RESTART, RIGID, Trace
from stretto.sim.world import Settings

_T = TypeVar("_T", np.int64, np.float64)

_COLUMNS = (
    "row", "workers", "pool", "restarts", "phase", "left", "anchor_s", "rate", "finish_s", "ran_s", "gpu_s", "waited_s",
    "changed_s", "started_s", "placed", "curve", "wanted", "part", "before",
)  # fmt: skip


class Tally:
    """What `Result` says of every job of the trace, as far as it has happened."""

    def __init__(self, jobs: int) -> None:
        self.start_s, self.finish_s = np.full(jobs, np.nan), np.full(jobs, np.nan)
        self.gpu_s, self.paused_s = np.zeros(jobs), np.zeros(jobs)
        self.lost_s, self.lost_to_failures_s = np.zeros(jobs), np.zeros(jobs)
        self.preemptions, self.resizes = np.zeros(jobs, np.int64), np.zeros(jobs, np.int64)
        self.rejected = np.zeros(jobs, np.bool_)


class Active:
    """Columns named after those of the snapshot hold the same, up to the last change where they count time."""

    def __init__(self, trace: Trace, settings: Settings, devices: IntArray | None = None) -> None:
        """`devices`: GPUs of each node, where nodes are told apart; None where GPUs are only counted."""
        nodes = 0 if devices is None else len(devices)
        self.trace, self.settings, self.nodes, self.devices = trace, settings, nodes, devices
        self.stakes = levels.stakes(trace, settings)
        self.crowded = bool(nodes and settings.contention)
        """Whether neighbours slow each other down."""
        self.columns = _COLUMNS + ("unsaved", "unsaved_s") * (self.stakes is not None) + ("slowed",) * self.crowded
        self.start_cost_s = levels.column_s(trace.start_s, settings.start_s, len(trace))
        """What a start costs each job of the trace, and a resize."""
        self.resize_cost_s = levels.column_s(trace.resize_s, settings.resize_s, len(trace))
        self.arrived = self.ended = 0
        self.tally = Tally(len(trace))
        ints, floats = np.empty(0, np.int64), np.empty(0)
        self.row = ints
        """The job's number: its row in the trace."""
        self.workers, self.pool, self.restarts, self.curve, self.wanted = ints, ints, ints, ints, ints
        self.ran_s, self.gpu_s, self.waited_s, self.changed_s, self.started_s = floats, floats, floats, floats, floats
        self.placed = np.zeros((0, nodes), np.int64)
        self.phase = ints
        self.left = floats
        """Work of its phase that is left at `anchor_s`: when progress begins after the pause of a change, or when all
        its workers take part. Below zero if it ends before that."""
        self.anchor_s, self.rate, self.finish_s = floats, floats, floats
        self.part, self.before = ints, floats
        """Until then so many workers take part, and its speed is this."""
        self.unsaved, self.unsaved_s = floats, floats
        """Steps, and seconds of progress, since the last checkpoint at `anchor_s`; where stops lose work."""
        self.slowed = floats
        """The part of its own speed that its neighbours leave a job; where they do."""

    def __len__(self) -> int:
        return len(self.row)

    # Coming and going.

    @property
    def next_arrival_s(self) -> float:
        return float(self.trace.submit_s[self.arrived]) if self.arrived < len(self.trace) else math.inf

    def admit(self, now_s: float) -> bool:
        """Let in everybody who was submitted by now."""
        if self.next_arrival_s > now_s:
            return False
        first, self.arrived = self.arrived, int(np.searchsorted(self.trace.submit_s, now_s, side="right"))
        rows, count = np.arange(first, self.arrived), self.arrived - first
        zeros, zero = np.zeros(count, np.int64), np.zeros(count)
        phases = self.trace.phases
        fresh = {
            "row": rows, "workers": zeros, "pool": zeros - 1, "restarts": zeros, "phase": zeros,
            "left": np.array([phases[r][0][0] for r in rows]) if phases else self.trace.work[rows],
            "anchor_s": zero, "rate": zero, "finish_s": self._service_ends(rows, now_s),
            "ran_s": zero, "gpu_s": zero, "waited_s": zero, "changed_s": self.trace.submit_s[rows],
            "started_s": np.full(count, np.nan),
            "placed": np.zeros((count, self.nodes), np.int64),
            "curve": np.array([phases[r][1][0] for r in rows], np.int64) if phases else self.trace.curve[rows],
            "wanted": zeros, "part": zeros, "before": zero,
            "unsaved": zero, "unsaved_s": zero, "slowed": np.ones(count),
        }  # fmt: skip
        for name in self.columns:
            setattr(self, name, np.concatenate((getattr(self, name), fresh[name])))
        return True

    def _service_ends(self, rows: IntArray, now_s: float) -> FloatArray:
        """A service ends by the clock, a training job when its work is done: not before it has workers."""
        ends = np.full(len(rows), math.inf)
        if self.trace.services:
            serves = np.array([self.trace.services[row] is not None for row in rows.tolist()])
            ends[serves] = now_s + self.trace.duration_s[rows[serves]]
        return ends

    def end(self, over: BoolArray, now_s: float) -> None:
        """These jobs are done."""
        self.tally.finish_s[self._take_out(over, now_s)] = now_s

    def reject(self, gone: BoolArray, now_s: float) -> None:
        """These jobs are turned away."""
        self.tally.rejected[self._take_out(gone, now_s)] = True

    def _take_out(self, gone: BoolArray, now_s: float) -> IntArray:
        rows = self.row[gone]
        span_s = now_s - self.changed_s[gone]
        self.tally.start_s[rows] = self.started_s[gone]
        self.tally.gpu_s[rows] = self.gpu_s[gone] + span_s * self.workers[gone] * self.trace.width[rows] / GPU
        self.ended += len(rows)
        stay = ~gone
        for name in self.columns:
            setattr(self, name, getattr(self, name)[stay])
        if self.crowded:
            self._feel_neighbours(now_s)
        return rows

    def next_phases(self, over: BoolArray, now_s: float) -> BoolArray:
        """Jobs with another phase go on with its work and curve; the others are really over."""
        if not self.trace.phases:
            return over
        over = over.copy()
        for j in np.flatnonzero(over).tolist():
            work, curves = self.trace.phases[int(self.row[j])]
            self.phase[j] += 1
            while self.phase[j] < len(work) and work[self.phase[j]] <= 0:
                self.phase[j] += 1
            if self.phase[j] >= len(work):
                continue
            over[j] = False
            if self.stakes is not None:
                steps, seconds = self.at_stake(now_s)
                self.unsaved[j], self.unsaved_s[j] = steps[j], seconds[j]
            self.curve = _with(self.curve, np.array([j]), curves[self.phase[j]])
            self.left[j], self.anchor_s[j] = work[self.phase[j]], now_s
            self.rate[j] = self._rate_of(j)
            self.finish_s[j] = now_s + self.left[j] / self.rate[j] if self.rate[j] > 0 else math.inf
        return over

    # Progress.

    def left_now(self, now_s: float) -> FloatArray:
        """Work left in the current phase."""
        since_s = now_s - self.anchor_s
        progress = self.rate * np.maximum(0.0, since_s) + self.before * np.minimum(0.0, since_s)
        return np.maximum(0.0, self.left - progress)

    def left_later(self) -> FloatArray:
        """Work left in the phases after it."""
        later = np.zeros(len(self))
        for j, (row, phase) in enumerate(zip(self.row.tolist(), self.phase.tolist(), strict=True)):
            later[j] = self.trace.phases[row][0][phase + 1 :].sum()
        return later

    def at_stake(self, now_s: float) -> tuple[FloatArray, FloatArray]:
        """Steps, and seconds of progress, that a stop now would undo."""
        assert self.stakes is not None
        every_s = self.stakes.every_s[self.row]
        ran_s = np.where(self.workers > 0, np.maximum(0.0, now_s - self.anchor_s), 0.0)
        since_s = self.unsaved_s + ran_s
        saves = np.isfinite(every_s) & (every_s > 0)
        if saves.any():
            since_s[saves] = np.fmod(since_s[saves], every_s[saves])
        since_s[every_s == 0] = 0.0
        steps = np.where(since_s <= ran_s, self.rate * since_s, self.unsaved + self.rate * ran_s)
        return steps, since_s

    # Other workers.

    def change(
        self,
        changed: BoolArray,
        workers: IntArray,
        pool: IntArray,
        placed: IntArray,
        now_s: float,
        tally_s: FloatArray | None = None,
    ) -> None:
        """Give the marked jobs their new workers, from now on. Seconds lost by that are added to the tally: of stops,
        unless another one is given.
        """
        at = np.flatnonzero(changed)
        undone = self._give_up(at, now_s, self.tally.lost_s if tally_s is None else tally_s)
        since_s, before = now_s - self.changed_s[at], self.workers[at]
        ran, runs = before > 0, workers[at] > 0
        self.ran_s[at] += np.where(ran, since_s, 0.0)
        self.waited_s[at] += np.where(ran, 0.0, since_s)
        self.gpu_s[at] += since_s * before * self.trace.width[self.row[at]] / GPU
        self.left[at] = self.left_now(now_s)[at]
        if undone is not None:
            self._undo(at, undone)
        coming_s = np.where(self.before[at] > 0, np.maximum(0.0, self.anchor_s[at] - now_s), 0.0)
        part = np.where(self.anchor_s[at] > now_s, self.part[at], before)
        self.changed_s = _with(self.changed_s, at, now_s)
        self.workers = _with(self.workers, at, workers[at])
        self.pool = _with(self.pool, at, pool[at])
        self.placed = placed
        starts, stops, resizes = runs & ~ran, ran & ~runs, runs & ran
        self.restarts = _with(self.restarts, at, self.restarts[at] + runs)
        fresh = at[starts & np.isnan(self.started_s[at])]
        self.started_s = _with(self.started_s, fresh, now_s)
        room_s = self.settings.leave_s if (self.workers[at] < before).any() else 0.0
        self._charge(at, starts, resizes, stops, now_s, room_s)
        self._join(at, before, part, coming_s, now_s, room_s)
        self._refresh_rates(at)
        if self.crowded:
            self._feel_neighbours(now_s)

    def refresh(self) -> None:
        """Let everybody go on from the workers that were put in from outside."""
        self._refresh_rates(np.flatnonzero(self.workers))

    def lose(self, node: int, now_s: float) -> BoolArray:
        """Whoever had workers on this node has lost them, with less than its minimum all of them; these jobs."""
        lost = self.placed[:, node]
        hit = lost > 0
        if not hit.any():
            return hit
        placed = self.placed.copy()
        placed[:, node] = 0
        workers = np.where(hit, self.workers - lost, self.workers)
        dead = hit & (workers < self.trace.min_workers[self.row])
        workers[dead] = 0
        placed[dead] = 0
        undone_s = np.where(dead & self._forgets(), self._unsaved_at_failure_s(now_s), 0.0)
        undone = self.rate * undone_s
        self.change(hit, workers, self.pool, placed, now_s, self.tally.lost_to_failures_s)
        self.left = self.left + undone
        self.tally.lost_to_failures_s[self.row] += undone_s
        return hit

    def _forgets(self) -> BoolArray:
        """Whom a failure that leaves no worker costs progress though a stop would not."""
        if self.stakes is None:
            return np.ones(len(self), np.bool_)
        forgets: BoolArray = self.stakes.every_s[self.row] == 0
        return forgets

    def _unsaved_at_failure_s(self, now_s: float) -> FloatArray:
        every_s = levels.checkpoints_s(self.trace, self.settings)[self.row]
        ran_for_s = np.maximum(0.0, now_s - self.anchor_s)
        return np.minimum(every_s, ran_for_s)

    def _give_up(self, at: IntArray, now_s: float, tally_s: FloatArray) -> FloatArray | None:
        """Steps that these jobs lose with the workers they have; None where nobody ever does."""
        if self.stakes is None:
            return None
        steps, seconds = self.at_stake(now_s)
        tally_s[self.row[at]] += seconds[at]
        self.unsaved[at] = self.unsaved_s[at] = 0.0
        return steps[at]

    def _undo(self, at: IntArray, steps: FloatArray) -> None:
        """Put back so much work, across phases where there are any."""
        if not self.trace.phases:
            self.left[at] += steps
            return
        curve = self.curve.copy()
        for j, undone in zip(at.tolist(), steps.tolist(), strict=True):
            work, curves = self.trace.phases[int(self.row[j])]
            while self.phase[j] and undone > work[self.phase[j]] - self.left[j]:
                undone -= work[self.phase[j]] - self.left[j]
                self.phase[j] -= 1
                self.left[j] = 0.0
            self.left[j] += undone
            curve[j] = curves[self.phase[j]]
        self.curve = curve

    def _feel_neighbours(self, now_s: float) -> None:
        """Let everybody go on at the speed that its neighbours leave it."""
        assert self.devices is not None
        width = self.trace.width[self.row]
        slowed = contention.speeds(self.placed, width, self.devices, self.settings.contention)
        at = np.flatnonzero((slowed != self.slowed) & (self.workers > 0))
        if self.stakes is not None:
            steps, seconds = self.at_stake(now_s)
            self.unsaved[at], self.unsaved_s[at] = steps[at], seconds[at]
        progress = self.rate[at] * np.maximum(0.0, now_s - self.anchor_s[at])
        self.left[at] = np.maximum(0.0, self.left[at] - progress)
        self.anchor_s[at] = np.maximum(self.anchor_s[at], now_s)
        self.slowed = slowed
        self._refresh_rates(at)

    def _charge(
        self, at: IntArray, starts: BoolArray, resizes: BoolArray, stops: BoolArray, now_s: float, room_s: float
    ) -> None:
        """`room_s`: until there is room for those who start."""
        rows = self.row[at]
        cost_s = np.where(starts, self.start_cost_s[rows] + room_s, np.where(resizes, self.resize_cost_s[rows], 0.0))
        # A job that is changed while it still pauses is charged for the longer of the rest and the new pause,
        # one that is stopped for neither.
        pauses = ~starts & (self.before[at] == 0)
        unspent_s = np.where(pauses, np.maximum(0.0, self.anchor_s[at] - now_s), 0.0)
        cost_s = np.where(resizes, np.maximum(cost_s, unspent_s), cost_s)
        self.tally.paused_s[rows] += cost_s - unspent_s
        self.tally.preemptions[rows] += stops
        self.tally.resizes[rows] += resizes
        self.anchor_s[at] = now_s + cost_s

    def _join(
        self, at: IntArray, before: IntArray, part: IntArray, coming_s: FloatArray, now_s: float, room_s: float
    ) -> None:
        """Let jobs that are not restarted go on as they were until newcomers take part, who first wait for room.
        `part` of the workers that they had `before` take part now, all of them in `coming_s`."""
        self.part[at], self.before[at] = np.where(before > 0, self.workers[at], 0), 0.0
        if not self.settings.join_s and not room_s:
            return
        level = self.trace.level
        goes_on = (part > 0) & (self.workers[at] > part)
        if level is not None:
            goes_on &= (level[self.row[at]] != RESTART) & (level[self.row[at]] != RIGID)
        for i in np.flatnonzero(goes_on).tolist():
            j = int(at[i])
            pause_s = float(self.resize_cost_s[self.row[j]])
            is_more = self.workers[j] > before[i]
            waits_s = self.settings.join_s + room_s if is_more else float(coming_s[i])
            self.part[j], self.anchor_s[j] = part[i], now_s + waits_s + pause_s
            if waits_s > 0:
                done = self._rate_of(j, int(part[i])) * waits_s
                self.before[j] = done / (waits_s + pause_s)
                self.left[j] -= done

    def _refresh_rates(self, at: IntArray) -> None:
        for j in at.tolist():
            rate = self.rate[j] = self._rate_of(j)
            if self.trace.services and self.trace.services[int(self.row[j])] is not None:
                continue
            speed = rate if self.left[j] >= 0 else self.before[j]
            self.finish_s[j] = self.anchor_s[j] + self.left[j] / speed if speed > 0 else math.inf

    def _rate_of(self, j: int, workers: int | None = None) -> float:
        """On the workers that it has, or so many of them."""
        count = int(self.workers[j]) if workers is None else workers
        if not count:
            return 0.0
        return self._own_rate(j, count) * float(self.slowed[j]) if self.crowded else self._own_rate(j, count)

    def _own_rate(self, j: int, count: int) -> float:
        pool, curve = int(self.pool[j]), int(self.curve[j])
        by_nodes = self.trace.spread_rates
        if by_nodes is not None and self.nodes:
            spans = int(np.count_nonzero(self.placed[j]))
            return float(by_nodes[pool, curve, min(count, by_nodes.shape[2] - 1), min(spans, by_nodes.shape[3] - 1)])
        rates = self.trace.rates
        return float(rates[pool, curve, min(count, rates.shape[2] - 1)])


def _with(column: NDArray[_T], at: IntArray, value: NDArray[_T] | float) -> NDArray[_T]:
    """A copy of the column with other values at some places."""
    changed = column.copy()
    changed[at] = value
    return changed
