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
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

_T = TypeVar("_T", np.int64, np.float64)

_COLUMNS = (
    "row", "workers", "pool", "restarts", "phase", "left", "anchor_s", "rate", "finish_s", "ran_s", "gpu_s", "waited_s",
    "changed_s", "started_s", "placed", "curve", "wanted",
)  # fmt: skip


class Tally:
    """What `Result` says of every job of the trace, as far as it has happened."""

    def __init__(self, jobs: int) -> None:
        self.start_s, self.finish_s = np.full(jobs, np.nan), np.full(jobs, np.nan)
        self.gpu_s, self.paused_s = np.zeros(jobs), np.zeros(jobs)
        self.preemptions, self.resizes = np.zeros(jobs, np.int64), np.zeros(jobs, np.int64)
        self.rejected = np.zeros(jobs, np.bool_)


class Active:
    """Columns named after those of the snapshot hold the same, up to the last change where they count time."""

    def __init__(self, trace: Trace, settings: Settings, nodes: int) -> None:
        """`nodes`: how many are told apart; 0 where GPUs are only counted."""
        self.trace, self.settings, self.nodes = trace, settings, nodes
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
        """Work of its phase that was left at `anchor_s`, when progress began after the pause of a change."""
        self.anchor_s, self.rate, self.finish_s = floats, floats, floats

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
            "wanted": zeros,
        }  # fmt: skip
        for name in _COLUMNS:
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
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[stay])
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
            self.curve = _with(self.curve, np.array([j]), curves[self.phase[j]])
            self.left[j], self.anchor_s[j] = work[self.phase[j]], now_s
            self.rate[j] = self._rate_of(j)
            self.finish_s[j] = now_s + self.left[j] / self.rate[j] if self.rate[j] > 0 else math.inf
        return over

    # Progress.

    def left_now(self, now_s: float) -> FloatArray:
        """Work left in the current phase."""
        return np.maximum(0.0, self.left - self.rate * np.maximum(0.0, now_s - self.anchor_s))

    def left_later(self) -> FloatArray:
        """Work left in the phases after it."""
        later = np.zeros(len(self))
        for j, (row, phase) in enumerate(zip(self.row.tolist(), self.phase.tolist(), strict=True)):
            later[j] = self.trace.phases[row][0][phase + 1 :].sum()
        return later

    # Other workers.

    def change(self, changed: BoolArray, workers: IntArray, pool: IntArray, placed: IntArray, now_s: float) -> None:
        """Give the marked jobs their new workers, from now on."""
        at = np.flatnonzero(changed)
        since_s, before = now_s - self.changed_s[at], self.workers[at]
        ran, runs = before > 0, workers[at] > 0
        self.ran_s[at] += np.where(ran, since_s, 0.0)
        self.waited_s[at] += np.where(ran, 0.0, since_s)
        self.gpu_s[at] += since_s * before * self.trace.width[self.row[at]] / GPU
        progress = self.rate[at] * np.maximum(0.0, now_s - self.anchor_s[at])
        self.left[at] = np.maximum(0.0, self.left[at] - progress)
        self.changed_s = _with(self.changed_s, at, now_s)
        self.workers = _with(self.workers, at, workers[at])
        self.pool = _with(self.pool, at, pool[at])
        self.placed = placed
        starts, stops, resizes = runs & ~ran, ran & ~runs, runs & ran
        self.restarts = _with(self.restarts, at, self.restarts[at] + runs)
        fresh = at[starts & np.isnan(self.started_s[at])]
        self.started_s = _with(self.started_s, fresh, now_s)
        self._charge(at, starts, resizes, stops, now_s)
        self._refresh_rates(at)

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
        ran_for_s = np.maximum(0.0, now_s - self.anchor_s)
        undone = np.where(dead, self.rate * np.minimum(self.settings.checkpoint_s, ran_for_s), 0.0)
        self.change(hit, workers, self.pool, placed, now_s)
        self.left = self.left + undone
        return hit

    def _charge(self, at: IntArray, starts: BoolArray, resizes: BoolArray, stops: BoolArray, now_s: float) -> None:
        cost_s = np.where(starts, self.settings.start_s, np.where(resizes, self.settings.resize_s, 0.0))
        # A job that is changed while it still pauses is charged for the longer of the rest and the new pause,
        # one that is stopped for neither.
        unspent_s = np.where(starts, 0.0, np.maximum(0.0, self.anchor_s[at] - now_s))
        cost_s = np.where(resizes, np.maximum(cost_s, unspent_s), cost_s)
        rows = self.row[at]
        self.tally.paused_s[rows] += cost_s - unspent_s
        self.tally.preemptions[rows] += stops
        self.tally.resizes[rows] += resizes
        self.anchor_s[at] = now_s + cost_s

    def _refresh_rates(self, at: IntArray) -> None:
        for j in at.tolist():
            rate = self.rate[j] = self._rate_of(j)
            if self.trace.services and self.trace.services[int(self.row[j])] is not None:
                continue
            self.finish_s[j] = self.anchor_s[j] + self.left[j] / rate if rate > 0 else math.inf

    def _rate_of(self, j: int) -> float:
        count = int(self.workers[j])
        if not count:
            return 0.0
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
