"""The discrete-event loop around a policy, for every kind of world.

One turn: (1) jump to the next moment at which anything happens, (2) let finished jobs go, new ones in,
nodes fail, loads change, (3) ask the policy with a snapshot, (4) check its answer and carry it out.
A job's finish time is computed once per change of its workers and never drifts.

`simulate` picks the incremental runner (`listrun`) where the policy is a declared list and the world
is simple enough; the results are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.core import invariants
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy, fail
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, History, IntArray, Nodes, Snapshot
from stretto.errors import MissingExtra, StrettoError, TraceError
from stretto.sim import cluster as clusters
from stretto.sim.trace import Trace
from stretto.sim.world import Change, Result, Settings

Progress = Callable[[int, int], None]
"""Called now and then with jobs ended and jobs in all."""

_T = TypeVar("_T", np.int64, np.float64)

_IDLE_TURNS = 100_000


def simulate(
    trace: Trace,
    pools: tuple[str, ...],
    nodes: Nodes,
    policy: Policy,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run the trace to its end under the policy."""
    world = settings or Settings()
    jobs = seen_by(policy, trace, pools)
    reject_oversized(jobs, pools, nodes)
    from stretto.sim import listrun

    if listrun.applies(jobs, pools, policy, world):
        return listrun.run(jobs, pools, nodes, policy, world, progress)
    return Engine(jobs, pools, nodes, policy, world, progress).run()


def seen_by(policy: Policy, trace: Trace, pools: tuple[str, ...]) -> Trace:
    """The jobs as the policy gets to see them: on the cluster's pools, and rigid unless it is elastic.

    Services follow their load under every policy.
    """
    if policy.traits.elastic:
        return on_pools(trace, pools)
    jobs = trace.rigid()
    if trace.services:
        serves = np.array([load is not None for load in trace.services])
        low = np.where(serves, trace.min_workers, jobs.min_workers)
        high = np.where(serves, trace.max_workers, jobs.max_workers)
        jobs = msgspec.structs.replace(jobs, min_workers=low, max_workers=high)
    return on_pools(jobs, pools)


def reject_oversized(trace: Trace, pools: tuple[str, ...], nodes: Nodes) -> None:
    """A job whose minimum is larger than every pool can never run: say so at once."""
    room = int(clusters.capacity(pools, nodes).max())
    need = trace.min_workers * trace.width
    if (need > room).any():
        j = int(np.argmax(need > room))
        raise TraceError(
            f"trace {trace.name!r}: job {trace.ids[j]!r} needs {need[j] / GPU:g} GPUs, the cluster has {room / GPU:g}",
            hint="use a larger --cluster, or take the job out of the trace",
        )


def on_pools(trace: Trace, pools: tuple[str, ...]) -> Trace:
    """Order the trace's throughputs by the cluster's pools."""
    if trace.pools == pools:
        return trace
    if len(trace.pools) == 1 and len(pools) == 1:
        return msgspec.structs.replace(trace, pools=pools)
    if len(trace.pools) == 1:
        spread = None if trace.spread_rates is None else np.repeat(trace.spread_rates, len(pools), axis=0)
        rates = np.repeat(trace.rates, len(pools), axis=0)
        return msgspec.structs.replace(trace, pools=pools, rates=rates, spread_rates=spread)
    missing = [pool for pool in pools if pool not in trace.pools]
    if missing:
        raise TraceError(
            f"trace {trace.name!r} has no throughputs for device type {missing[0]!r}",
            hint=f"it knows {', '.join(trace.pools)}; use these as types in the cluster file",
        )
    rows = [trace.pools.index(pool) for pool in pools]
    return msgspec.structs.replace(trace, pools=pools, rates=trace.rates[rows])


class Engine:
    """The state of one run. Arrays named after snapshot columns hold the active jobs only."""

    def __init__(
        self,
        trace: Trace,
        pools: tuple[str, ...],
        nodes: Nodes,
        policy: Policy,
        settings: Settings,
        progress: Progress | None = None,
    ) -> None:
        self.trace, self.pools, self.nodes = trace, pools, nodes
        self.policy, self.settings, self.progress = policy, settings, progress
        self.now = 0.0
        self.memory: Memory = None
        self.wake, self.asked = math.inf, -math.inf
        self.capacity, self.devices_at_start = clusters.capacity(pools, nodes), nodes.devices
        self.placed_nodes = len(nodes.name) if settings.placement or settings.failures else 0
        self._random_error()
        self._active_columns()
        self._result_columns()
        self._static: dict[str, object] | None = None
        self._total = np.empty(0)
        low = np.minimum(trace.min_workers, trace.rates.shape[2] - 1)
        self.sizes = trace.work / np.maximum(1e-12, trace.rates[0, trace.curve, low])
        self.history = History()
        self.failures = sorted(settings.failures, key=lambda f: (f.at_s, f.node))
        self.changes: list[Change] = []
        self.arrived = self.ended = self.events = self.decisions = self.idle = 0

    def _random_error(self) -> None:
        n, sd = len(self.trace), self.settings.estimate_sd
        normal = np.random.default_rng(self.settings.seed).standard_normal(n) if sd else np.zeros(n)
        self.error = np.exp(sd * normal - sd * sd / 2)

    def _active_columns(self) -> None:
        ints, floats = np.empty(0, np.int64), np.empty(0)
        self.row = ints
        self.workers, self.pool, self.restarts, self.phase = ints, ints, ints, ints
        self.left, self.anchor, self.rate, self.finish = floats, floats, floats, floats
        self.ran, self.held, self.waited, self.changed, self.started = floats, floats, floats, floats, floats
        self.placed = np.zeros((0, self.placed_nodes), np.int64)
        self.curve, self.wanted = ints, ints

    def _result_columns(self) -> None:
        n = len(self.trace)
        self.out_start, self.out_finish = np.full(n, np.nan), np.full(n, np.nan)
        self.out_gpu_s, self.out_paused = np.zeros(n), np.zeros(n)
        self.out_preemptions, self.out_resizes = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.out_rejected = np.zeros(n, np.bool_)

    # The loop.

    def run(self) -> Result:
        """All turns, to the end of the last job."""
        while self.ended < len(self.trace):
            self.now = self._next_moment()
            self.events += 1
            touched = self._release_finished() | self._admit_arrivals()
            touched |= self._apply_failures() | self._apply_loads()
            if touched and not (self.policy.traits.rounds and self.wake < math.inf):
                self.wake = min(self.wake, self.now)
            if self.now >= self._next_ask():
                self._ask_and_act()
            if self.progress is not None and self.events % 512 == 0:
                self.progress(self.ended, len(self.trace))
        return self._result()

    def _next_ask(self) -> float:
        slot_s = self.settings.slot_s
        ask = max(self.wake, self.asked + self.settings.gap_s)
        return math.ceil(ask / slot_s) * slot_s if slot_s and ask < math.inf else ask

    def _next_moment(self) -> float:
        ask = self._next_ask()
        moments = [ask]
        if self.arrived < len(self.trace):
            moments.append(float(self.trace.submit_s[self.arrived]))
        if len(self.finish):
            moments.append(float(self.finish.min()))
        if self.failures:
            moments.append(self.failures[0].at_s)
        if self.trace.services:
            moments.append(self._next_load_change())
        moment = min(moments)
        self.idle = self.idle + 1 if moment == ask else 0
        if moment == math.inf or self.idle > _IDLE_TURNS:
            job = self.trace.ids[int(self.row[0])]
            raise fail(self.policy.name, f"leaves job {job!r} waiting for ever: nothing runs and nothing will happen")
        return max(moment, self.now)

    def _release_finished(self) -> bool:
        over = self.finish <= self.now
        if not over.any():
            return False
        over = self._next_phases(over)
        if over.any():
            self._drop(over, self.now)
        return True

    def _next_phases(self, over: BoolArray) -> BoolArray:
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
            self.curve = self.curve.copy()
            self.curve[j] = curves[self.phase[j]]
            self.left[j], self.anchor[j] = work[self.phase[j]], self.now
            self.rate[j] = self._rate_of(j)
            self.finish[j] = self.now + self.left[j] / self.rate[j] if self.rate[j] > 0 else math.inf
        return over

    def _drop(self, gone: BoolArray, finish_s: float) -> None:
        """Take jobs out of the active columns and write their results."""
        rows = self.row[gone]
        span = self.now - self.changed[gone]
        self.out_finish[rows] = finish_s
        self.out_start[rows] = self.started[gone]
        held = span * self.workers[gone] * self.trace.width[rows] / GPU
        self.out_gpu_s[rows] = self.held[gone] + held
        self._remember(rows)
        self.ended += len(rows)
        stay = ~gone
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[stay])
        self._static = None

    def _remember(self, rows: IntArray) -> None:
        if "history" not in self.policy.traits.uses or self.settings.lengths == "known":
            return
        for row in rows.tolist():
            klass, submit = int(self.trace.klass[row]), float(self.trace.submit_s[row])
            self.history = self.history.adding(klass, row, submit, float(self.sizes[row]))

    def _admit_arrivals(self) -> bool:
        first = self.arrived
        while self.arrived < len(self.trace) and self.trace.submit_s[self.arrived] <= self.now:
            self.arrived += 1
        count = self.arrived - first
        if not count:
            return False
        rows = np.arange(first, self.arrived)
        zeros, zero = np.zeros(count, np.int64), np.zeros(count)
        phases = self.trace.phases
        fresh = {
            "row": rows, "workers": zeros, "pool": zeros - 1, "restarts": zeros, "phase": zeros,
            "left": np.array([phases[r][0][0] for r in rows]) if phases else self.trace.work[rows],
            "anchor": zero, "rate": zero, "finish": np.full(count, math.inf),
            "ran": zero, "held": zero, "waited": zero, "changed": self.trace.submit_s[rows],
            "started": np.full(count, np.nan),
            "placed": np.zeros((count, self.placed_nodes), np.int64),
            "curve": np.array([phases[r][1][0] for r in rows], np.int64) if phases else self.trace.curve[rows],
            "wanted": zeros,
        }  # fmt: skip
        for name in _COLUMNS:
            setattr(self, name, np.concatenate((getattr(self, name), fresh[name])))
        if self.trace.services:
            for j in range(len(self.row) - count, len(self.row)):
                if self.trace.services[int(self.row[j])] is not None:
                    self.finish[j] = self.now + self.trace.duration_s[int(self.row[j])]
        self._static = None
        return True

    # Failures and loads.

    def _apply_failures(self) -> bool:
        happened = False
        while self.failures and self.failures[0].at_s <= self.now:
            failure = self.failures.pop(0)
            happened = True
            devices = self.nodes.devices.copy()
            devices[failure.node] = self.devices_at_start[failure.node] if failure.up else 0
            self.nodes = msgspec.structs.replace(self.nodes, devices=devices)
            self.capacity = clusters.capacity(self.pools, self.nodes)
            if not failure.up:
                self._lose_workers(failure.node)
        return happened

    def _lose_workers(self, node: int) -> None:
        lost = self.placed[:, node]
        hit = lost > 0
        if not hit.any():
            return
        placed = self.placed.copy()
        placed[:, node] = 0
        workers = np.where(hit, self.workers - lost, self.workers)
        dead = hit & (workers < self.trace.min_workers[self.row])
        workers[dead] = 0
        placed[dead] = 0
        ran_for = np.maximum(0.0, self.now - self.anchor)
        undone = np.where(dead, self.rate * np.minimum(self.settings.checkpoint_s, ran_for), 0.0)
        if self.settings.record:
            self._record_lost(hit, workers, placed)
        self._change(hit, workers, self.pool, placed)
        self.left = self.left + undone

    def _next_load_change(self) -> float:
        soonest = math.inf
        for j in range(len(self.row)):
            load = self.trace.services[int(self.row[j])]
            if load is not None:
                later = load.at_s[load.at_s > self.now]
                soonest = min(soonest, float(later[0]) if len(later) else math.inf)
        return soonest

    def _apply_loads(self) -> bool:
        if not self.trace.services:
            return False
        wanted = self.wanted.copy()
        for j in range(len(self.row)):
            load = self.trace.services[int(self.row[j])]
            if load is not None:
                i = int(np.searchsorted(load.at_s, self.now, side="right")) - 1
                wanted[j] = load.wanted[i] if i >= 0 else 0
        changed = not np.array_equal(wanted, self.wanted)
        self.wanted = wanted
        return changed

    # Asking and acting.

    def _ask_and_act(self) -> None:
        if not len(self.row):
            self.wake = math.inf
            return
        view = self.snapshot()
        self.asked = self.now
        decision = self._ask(view)
        self.memory, self.wake = decision.memory, decision.wake_s
        self.decisions += 1
        if decision.rejected is not None and decision.rejected.any():
            decision = self._turn_away(decision)
        placed = self._place(view, decision) if self.placed_nodes else self.placed
        workers = placed.sum(axis=1) if self.placed_nodes else decision.workers
        pool = np.where(workers > 0, decision.pool, -1)
        changed = (workers != self.workers) | ((workers > 0) & (pool != self.pool))
        if self.placed_nodes:
            changed |= (placed != self.placed).any(axis=1)
        if changed.any():
            if self.settings.record:
                self._record(changed, workers, pool, placed, decision)
            self._change(changed, workers, pool, placed)

    def _ask(self, view: Snapshot) -> Decision:
        try:
            decision = self.policy.decide(view, self.memory)
            invariants.check(self.policy, view, decision)
        except StrettoError:
            raise
        except ModuleNotFoundError as error:
            hint = f"pip install {error.name}, or 'stretto[sim]' for all that our own policies use"
            raise MissingExtra(f"policy {self.policy.name!r} needs {error.name}", hint=hint) from error
        except Exception as error:
            raise fail(self.policy.name, f"raised {type(error).__name__}: {error} at {view.now_s:g} s") from error
        return decision

    def snapshot(self) -> Snapshot:
        """The world as the policy sees it now."""
        if self._static is None:
            t, row = self.trace, self.row
            services = np.zeros(len(row), np.bool_)
            if t.services:
                services = np.array([t.services[r] is not None for r in row.tolist()], np.bool_)
            self._static = {
                "job": row, "klass": t.klass[row], "submit_s": t.submit_s[row], "priority": t.priority[row],
                "deadline_s": t.deadline_s[row], "requested": t.requested[row],
                "min_workers": t.min_workers[row], "max_workers": t.max_workers[row],
                "width": t.width[row], "fixed_milli": np.zeros(len(row), np.int64), "demand": t.demand[row],
                "resize_s": np.full(len(row), self.settings.resize_s),
                "start_s": np.full(len(row), self.settings.start_s), "is_service": services,
                "remaining_sd": np.full(len(row), self.settings.estimate_sd),
            }  # fmt: skip
            self._total = t.work[row]
        left, later = self._left_now()
        since = self.now - self.changed
        runs = self.workers > 0
        remaining = left + later if self.trace.phases else left
        done = self._total - remaining
        if self.settings.lengths == "unknown":
            remaining = np.full(len(left), np.nan)
        elif self.settings.estimate_sd:
            remaining = remaining * self.error[self.row]
        return Snapshot(
            now_s=self.now,
            pools=self.pools,
            capacity=self.capacity,
            nodes=self.nodes,
            rates=self.trace.rates,
            spread_rates=self.trace.spread_rates if self.placed_nodes else None,
            history=self.history,
            **self._static,  # type: ignore[arg-type]
            curve=self.curve,
            wanted=self.wanted,
            workers=self.workers,
            pool=self.pool,
            placed=self.placed,
            remaining=remaining,
            done=done,
            ran_s=self.ran + np.where(runs, since, 0.0),
            gpu_s=self.held + since * self.workers * self._static["width"] / GPU,  # type: ignore[operator]
            waited_s=self.waited + np.where(runs, 0.0, since),
            started_s=self.started,
            changed_s=self.changed,
            restarts=self.restarts,
        )

    def _left_now(self) -> tuple[FloatArray, FloatArray]:
        """Work left in the current phase, and in the phases after it."""
        left = np.maximum(0.0, self.left - self.rate * np.maximum(0.0, self.now - self.anchor))
        later = np.zeros(len(left))
        if self.trace.phases:
            for j, (row, phase) in enumerate(zip(self.row.tolist(), self.phase.tolist(), strict=True)):
                later[j] = self.trace.phases[row][0][phase + 1 :].sum()
        return left, later

    def _turn_away(self, decision: Decision) -> Decision:
        gone = decision.rejected
        assert gone is not None
        rows = self.row[gone]
        self.out_rejected[rows] = True
        self._drop(gone, math.nan)
        stay = ~gone
        return Decision(
            workers=decision.workers[stay], pool=decision.pool[stay], reason=decision.reason[stay],
            detail=decision.detail[stay], nodes=None if decision.nodes is None else decision.nodes[stay],
        )  # fmt: skip

    def _place(self, view: Snapshot, decision: Decision) -> IntArray:
        if decision.nodes is not None:
            return decision.nodes
        from stretto.core import placement

        place = placement.load(self.settings.placement or "pack")
        if len(view) != len(self.row):
            view = self.snapshot()
        return place(view, decision.workers, decision.pool)

    def _change(self, changed: BoolArray, workers: IntArray, pool: IntArray, placed: IntArray) -> None:
        """Give the marked jobs their new workers, from now on.

        Columns that snapshots show are replaced, never written: a snapshot stays what it was.
        """
        at = np.flatnonzero(changed)
        since, before = self.now - self.changed[at], self.workers[at]
        ran, runs = before > 0, workers[at] > 0
        self.ran[at] += np.where(ran, since, 0.0)
        self.waited[at] += np.where(ran, 0.0, since)
        self.held[at] += since * before * self.trace.width[self.row[at]] / GPU
        progress = self.rate[at] * np.maximum(0.0, self.now - self.anchor[at])
        self.left[at] = np.maximum(0.0, self.left[at] - progress)
        self.changed = _with(self.changed, at, self.now)
        self.workers = _with(self.workers, at, workers[at])
        self.pool = _with(self.pool, at, pool[at])
        self.placed = placed
        starts, stops, resizes = runs & ~ran, ran & ~runs, runs & ran
        self.restarts = _with(self.restarts, at, self.restarts[at] + runs)
        fresh = at[starts & np.isnan(self.started[at])]
        self.started = _with(self.started, fresh, self.now)
        self._charge(at, starts, resizes, stops)
        self._refresh_rates(at)

    def _charge(self, at: IntArray, starts: BoolArray, resizes: BoolArray, stops: BoolArray) -> None:
        cost = np.where(starts, self.settings.start_s, np.where(resizes, self.settings.resize_s, 0.0))
        # A job that is changed while it still pauses is charged for the longer of the rest and the new pause,
        # one that is stopped for neither.
        unspent = np.where(starts, 0.0, np.maximum(0.0, self.anchor[at] - self.now))
        cost = np.where(resizes, np.maximum(cost, unspent), cost)
        rows = self.row[at]
        self.out_paused[rows] += cost - unspent
        self.anchor[at] = self.now + cost
        self.out_preemptions[rows] += stops
        self.out_resizes[rows] += resizes

    def _refresh_rates(self, at: IntArray) -> None:
        for j in at.tolist():
            rate = self.rate[j] = self._rate_of(j)
            if self.trace.services and self.trace.services[int(self.row[j])] is not None:
                continue
            self.finish[j] = self.anchor[j] + self.left[j] / rate if rate > 0 else math.inf

    def _rate_of(self, j: int) -> float:
        count = int(self.workers[j])
        if not count:
            return 0.0
        pool, curve = int(self.pool[j]), int(self.curve[j])
        by_nodes = self.trace.spread_rates
        if by_nodes is not None and self.placed_nodes:
            spans = int(np.count_nonzero(self.placed[j]))
            return float(by_nodes[pool, curve, min(count, by_nodes.shape[2] - 1), min(spans, by_nodes.shape[3] - 1)])
        rates = self.trace.rates
        return float(rates[pool, curve, min(count, rates.shape[2] - 1)])

    def _record(
        self, changed: BoolArray, workers: IntArray, pool: IntArray, placed: IntArray, decision: Decision
    ) -> None:
        for j in np.flatnonzero(changed).tolist():
            reason, (first, second) = int(decision.reason[j]), decision.detail[j].tolist()
            if workers[j] == 0 and decision.workers[j]:
                free = self.capacity.sum() - (workers * self.trace.width[self.row]).sum()
                reason, first, second = int(Reason.FRAGMENTED), int(decision.workers[j]), float(free) / GPU
            self._append_change(j, int(workers[j]), int(pool[j]), reason, first, second, placed)

    def _record_lost(self, hit: BoolArray, workers: IntArray, placed: IntArray) -> None:
        for j in np.flatnonzero(hit).tolist():
            left = int(workers[j])
            self._append_change(j, left, int(self.pool[j]), int(Reason.NODE_LOST), left, 0.0, placed)

    def _append_change(
        self, j: int, workers: int, pool: int, reason: int, first: float, second: float, placed: IntArray
    ) -> None:
        nodes = tuple(placed[j].tolist()) if self.placed_nodes else ()
        self.changes.append(Change(self.now, int(self.row[j]), workers, pool, reason, first, second, nodes))

    def _result(self) -> Result:
        services = self.trace.services
        return Result(
            policy=self.policy.name,
            start_s=self.out_start,
            finish_s=self.out_finish,
            gpu_s=self.out_gpu_s,
            preemptions=self.out_preemptions,
            resizes=self.out_resizes,
            paused_s=self.out_paused,
            rejected=self.out_rejected,
            is_service=np.array([s is not None for s in services] or [False] * len(self.trace), np.bool_),
            events=self.events,
            decisions=self.decisions,
            changes=tuple(self.changes),
        )


_COLUMNS = (
    "row", "workers", "pool", "restarts", "phase", "left", "anchor", "rate", "finish", "ran", "held", "waited",
    "changed", "started", "placed", "curve", "wanted",
)  # fmt: skip


def _with(column: NDArray[_T], at: IntArray, value: NDArray[_T] | float) -> NDArray[_T]:
    """A copy of the column with other values at some places."""
    changed = column.copy()
    changed[at] = value
    return changed
