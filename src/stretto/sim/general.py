"""The discrete-event loop around a policy, for every kind of world.

One turn: (1) jump to the next moment at which anything happens, (2) let finished jobs go, new ones in,
nodes fail, loads change, (3) ask the policy with a snapshot, (4) check its answer and carry it out.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import numpy as np

from stretto.core import cycle
from stretto.core.agenda import Agenda
from stretto.core.cycle import CycleState, Outcome
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import BoolArray, FloatArray, History, IntArray, Nodes, Snapshot
from stretto.sim import learning
from stretto.sim.active import Active
from stretto.sim.machines import Machines
from stretto.sim.trace import Trace
from stretto.sim.turns import IDLE_TURNS, LOST_TIMES, REPORT_EVERY, Progress, hopeless, stuck
from stretto.sim.views import Views
from stretto.sim.world import Change, Result, Settings


class Between(Protocol):
    """Stands between the world and the cycle, where that is told less, or otherwise, than it is."""

    def seen(self, view: Snapshot, speed: FloatArray) -> Snapshot:
        """The snapshot as the cycle gets to see it. `speed`: steps/s that each job really makes now."""

    def ended(self, numbers: IntArray) -> None:
        """These jobs have finished."""

    def next_s(self, numbers: IntArray, workers: IntArray, pool: IntArray, changed_s: FloatArray) -> float:
        """When there will be news for the cycle; inf: there will be none."""


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
        self.placing = bool(settings.placement or settings.failures or settings.contention)
        """Whether nodes are told apart; otherwise GPUs are only counted."""
        self.jobs = Active(trace, settings, nodes.devices if self.placing else None)
        self.machines = Machines(pools, nodes, settings.failures)
        self.views = Views(trace, settings)
        self.learner: Between | None = learning.learner(settings)
        self.history = History()
        self.rules, self.state = settings.cycle, CycleState()
        self.agenda = Agenda(wake_s=math.inf)
        self.now_s = 0.0
        self.changes: list[Change] = []
        self.events = self.decisions = self.idle = 0
        self.patience = IDLE_TURNS
        """Turns in a row in which nothing but thinking happens, where nobody makes progress."""

    def run(self) -> Result:
        """All turns, to the end of the last job that has one: some services go on for ever."""
        endless = int(np.isinf(self.trace.duration_s).sum())
        while self.jobs.ended < len(self.trace) - endless:
            self.now_s = self.next_moment()
            self.events += 1
            touched = self._release_finished() | self.jobs.admit(self.now_s)
            urgent = self._apply_failures() | self._apply_loads()
            if touched or urgent:
                rounds = self.policy.traits.rounds
                self.agenda = self.agenda.touched(self.now_s, rounds=rounds, urgent=urgent)
            if self.now_s >= self.agenda.due_s(self.settings.slot_s):
                self.ask_and_act()
            if self.events % REPORT_EVERY == 0:
                self._report()
        return self.result()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self.jobs.ended, len(self.trace))
        often = self.jobs.tally.lost_s > LOST_TIMES * np.maximum(self.trace.duration_s, 1.0)
        if often.any():
            raise hopeless(self.policy.name, self.trace.ids[int(np.argmax(often))], LOST_TIMES)

    def next_moment(self) -> float:
        """When anything happens next."""
        ask_s = self.agenda.due_s(self.settings.slot_s)
        end_s = float(self.jobs.finish_s.min(initial=math.inf))
        moment_s = min(ask_s, self.jobs.next_arrival_s, end_s, self.machines.next_s, self._next_load_change())
        self.idle = self.idle + 1 if moment_s == ask_s else 0
        if moment_s == math.inf or self.idle > (IDLE_TURNS if end_s < math.inf else self.patience):
            raise stuck(self.policy.name, self.trace.ids[int(self.jobs.row[0])])
        return max(moment_s, self.now_s)

    def snapshot(self) -> Snapshot:
        """The world as the policy sees it now."""
        view = self.views.snapshot(self.now_s, self.jobs, self.machines, self.history)
        return self.learner.seen(view, self.jobs.rate) if self.learner else view

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
        if not len(self.jobs):
            self.agenda = self.agenda.answered(self.now_s, self.now_s, 0.0, math.inf, self.settings.gap_s)
            return
        view = self.snapshot()
        outcome = cycle.decide(view, self.policy, self.state, self.rules, when=f" at {view.now_s:g} s")
        self.agenda = self.agenda.answered(self.now_s, self.now_s, 0.0, outcome.wake_s, self.settings.gap_s)
        self.state = outcome.state
        self.decisions += 1
        if outcome.rejected.any():
            self.jobs.reject(outcome.rejected, self.now_s)
            outcome = _without(outcome, outcome.rejected)
        self._carry_out(outcome)
        if self.learner and not self.policy.traits.rounds:
            jobs = self.jobs
            news_s = self.learner.next_s(jobs.row, jobs.workers, jobs.pool, jobs.changed_s)
            self.agenda = msgspec.structs.replace(self.agenda, wake_s=min(self.agenda.wake_s, news_s))

    def _carry_out(self, outcome: Outcome) -> None:
        jobs = self.jobs
        changed = (outcome.workers != jobs.workers) | ((outcome.workers > 0) & (outcome.pool != jobs.pool))
        if self.placing:
            changed |= (outcome.placed != jobs.placed).any(axis=1)
        if not changed.any():
            return
        jobs.change(changed, outcome.workers, outcome.pool, outcome.placed, self.now_s)
        if self.settings.record:
            for j in np.flatnonzero(changed).tolist():
                self._note(j, Reason(int(outcome.reason[j])), *outcome.detail[j].tolist())

    # What is left behind.

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
            lost_s=tally.lost_s,
            lost_to_failures_s=tally.lost_to_failures_s,
            rejected=tally.rejected,
            is_service=np.array([s is not None for s in services] or [False] * len(self.trace), np.bool_),
            events=self.events,
            decisions=self.decisions,
            changes=tuple(self.changes),
        )


def _without(outcome: Outcome, gone: BoolArray) -> Outcome:
    """The outcome for the jobs that were not turned away."""
    names = ("workers", "pool", "placed", "reason", "detail", "about", "decided", "rejected")
    return msgspec.structs.replace(outcome, **{name: getattr(outcome, name)[~gone] for name in names})
