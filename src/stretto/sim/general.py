"""The discrete-event loop around a policy, for every kind of world.

One turn: (1) jump to the next moment at which anything happens, (2) let finished jobs go, new ones in,
nodes fail, loads change, (3) ask the policy with a snapshot, (4) check its answer and carry it out.
"""

from __future__ import annotations

import math

import numpy as np

from stretto.core import asking, placement, reasons, steps
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, History, IntArray, Nodes, Snapshot
from stretto.sim import learning
from stretto.sim.active import Active
from stretto.sim.machines import Machines
from stretto.sim.trace import Trace
from stretto.sim.turns import IDLE_TURNS, REPORT_EVERY, Progress, stuck
from stretto.sim.views import Views
from stretto.sim.world import Change, Result, Settings


class Engine:
    """The state of one run."""

    def __init__(
        self,
        trace: Trace,
        pools: tuple[str, ...],
        nodes: Nodes,
        policy: Policy,
        settings: Settings,
        progress: Progress | None = None,
    ) -> None:
        self.trace, self.policy, self.settings, self.progress = trace, policy, settings, progress
        self.placing = bool(settings.placement or settings.failures)
        """Whether nodes are told apart; otherwise GPUs are only counted."""
        self.jobs = Active(trace, settings, len(nodes.name) if self.placing else 0)
        self.machines = Machines(pools, nodes, settings.failures)
        self.views = Views(trace, settings)
        self.learner = learning.learner(settings)
        self.history = History()
        self.memory: Memory = None
        self.now_s, self.wake_s, self.asked_s = 0.0, math.inf, -math.inf
        self.changes: list[Change] = []
        self.events = self.decisions = self.idle = 0

    def run(self) -> Result:
        """All turns, to the end of the last job."""
        while self.jobs.ended < len(self.trace):
            self.now_s = self.next_moment()
            self.events += 1
            touched = self._release_finished() | self.jobs.admit(self.now_s)
            touched |= self._apply_failures() | self._apply_loads()
            if touched and not (self.policy.traits.rounds and self.wake_s < math.inf):
                self.wake_s = min(self.wake_s, self.now_s)
            if self.now_s >= self._next_ask():
                self.ask_and_act()
            if self.progress is not None and self.events % REPORT_EVERY == 0:
                self.progress(self.jobs.ended, len(self.trace))
        return self.result()

    def _next_ask(self) -> float:
        slot_s = self.settings.slot_s
        ask_s = max(self.wake_s, self.asked_s + self.settings.gap_s)
        return math.ceil(ask_s / slot_s) * slot_s if slot_s and ask_s < math.inf else ask_s

    def next_moment(self) -> float:
        """When anything happens next."""
        ask_s = self._next_ask()
        end_s = float(self.jobs.finish_s.min(initial=math.inf))
        moment_s = min(ask_s, self.jobs.next_arrival_s, end_s, self.machines.next_s, self._next_load_change())
        self.idle = self.idle + 1 if moment_s == ask_s else 0
        if moment_s == math.inf or self.idle > IDLE_TURNS:
            raise stuck(self.policy.name, self.trace.ids[int(self.jobs.row[0])])
        return max(moment_s, self.now_s)

    def snapshot(self) -> Snapshot:
        """The world as the policy sees it now."""
        view = self.views.snapshot(self.now_s, self.jobs, self.machines, self.history)
        return self.learner.seen(view) if self.learner else view

    # What happens to the jobs.

    def _release_finished(self) -> bool:
        over = self.jobs.finish_s <= self.now_s
        if not over.any():
            return False
        over = self.jobs.next_phases(over, self.now_s)
        if over.any():
            self._remember(self.jobs.row[over])
            if self.learner:
                self.learner.ended(self.jobs.row[over])
            self.jobs.end(over, self.now_s)
        return True

    def _remember(self, rows: IntArray) -> None:
        """What policies may learn from jobs that have finished: the time each needed on its minimum of workers."""
        if "history" not in self.policy.traits.uses or self.settings.lengths == "known":
            return
        trace = self.trace
        for row in rows.tolist():
            low = min(int(trace.min_workers[row]), trace.rates.shape[2] - 1)
            size_s = float(trace.work[row] / max(1e-12, trace.rates[0, trace.curve[row], low]))
            self.history = self.history.adding(int(trace.klass[row]), row, float(trace.submit_s[row]), size_s)

    def _apply_failures(self) -> bool:
        happened = self.machines.advance(self.now_s)
        for failure in happened:
            if not failure.up:
                hit = self.jobs.lose(failure.node, self.now_s)
                for j in np.flatnonzero(hit).tolist():
                    self._note(j, Reason.NODE_LOST, float(self.jobs.workers[j]), 0.0)
        return bool(happened)

    def _next_load_change(self) -> float:
        services = self.trace.services
        loads = [services[row] for row in self.jobs.row.tolist()] if services else []
        return min((load.next_s(self.now_s) for load in loads if load is not None), default=math.inf)

    def _apply_loads(self) -> bool:
        if not self.trace.services:
            return False
        before = self.jobs.wanted
        self.jobs.wanted = before.copy()
        for j, row in enumerate(self.jobs.row.tolist()):
            load = self.trace.services[row]
            if load is not None:
                self.jobs.wanted[j] = load.wanted_at(self.now_s)
        return not np.array_equal(before, self.jobs.wanted)

    # Asking and acting.

    def ask_and_act(self) -> None:
        """Let the policy decide, and carry it out."""
        jobs = self.jobs
        if not len(jobs):
            self.wake_s = math.inf
            return
        view = self.snapshot()
        decision = asking.ask(self.policy, view, self.memory, f" at {view.now_s:g} s")
        self.asked_s, self.memory, self.wake_s = self.now_s, decision.memory, decision.wake_s
        self.decisions += 1
        if decision.rejected is not None and decision.rejected.any():
            decision = self._turn_away(decision)
        placed = self._place(view, decision) if self.placing else jobs.placed
        workers = placed.sum(axis=1) if self.placing else decision.workers
        pool = np.where(workers > 0, decision.pool, -1)
        changed = (workers != jobs.workers) | ((workers > 0) & (pool != jobs.pool))
        if self.placing:
            changed |= (placed != jobs.placed).any(axis=1)
        if changed.any():
            jobs.change(changed, workers, pool, placed, self.now_s)
            if self.settings.record:
                self._record(np.flatnonzero(changed), decision)
        if self.learner and not self.policy.traits.rounds:
            news_s = self.learner.next_s(jobs.row, jobs.workers, jobs.pool, jobs.changed_s)
            self.wake_s = min(self.wake_s, news_s)

    def _turn_away(self, decision: Decision) -> Decision:
        """Let the rejected jobs go; the decision on the others."""
        gone = decision.rejected
        assert gone is not None
        self.jobs.reject(gone, self.now_s)
        stay = ~gone
        return Decision(
            workers=decision.workers[stay], pool=decision.pool[stay], reason=decision.reason[stay],
            detail=decision.detail[stay], nodes=None if decision.nodes is None else decision.nodes[stay],
        )  # fmt: skip

    def _place(self, view: Snapshot, decision: Decision) -> IntArray:
        if decision.nodes is not None:
            return decision.nodes
        if len(view) != len(self.jobs):
            view = self.snapshot()
        placed = placement.load(self.settings.placement or "pack")(view, decision.workers, decision.pool)
        return steps.trimmed(view, placed)

    # What is left behind.

    def _record(self, changed: IntArray, decision: Decision) -> None:
        jobs = self.jobs
        free = int(self.machines.capacity.sum() - (jobs.workers * self.trace.width[jobs.row]).sum()) / GPU
        for j in changed.tolist():
            wish, got = int(decision.workers[j]), int(jobs.workers[j])
            if got == wish:
                self._note(j, Reason(int(decision.reason[j])), *decision.detail[j].tolist())
            else:
                self._note(j, *reasons.fragmented(wish, got, free))

    def _note(self, j: int, reason: Reason, first: float, second: float) -> None:
        if not self.settings.record:
            return
        jobs = self.jobs
        nodes = tuple(jobs.placed[j].tolist()) if self.placing else ()
        row, workers, pool = int(jobs.row[j]), int(jobs.workers[j]), int(jobs.pool[j])
        self.changes.append(Change(self.now_s, row, workers, pool, int(reason), first, second, nodes))

    def result(self) -> Result:
        """What has happened."""
        tally, services = self.jobs.tally, self.trace.services
        return Result(
            policy=self.policy.name,
            start_s=tally.start_s,
            finish_s=tally.finish_s,
            gpu_s=tally.gpu_s,
            preemptions=tally.preemptions,
            resizes=tally.resizes,
            paused_s=tally.paused_s,
            rejected=tally.rejected,
            is_service=np.array([s is not None for s in services] or [False] * len(self.trace), np.bool_),
            events=self.events,
            decisions=self.decisions,
            changes=tuple(self.changes),
        )
