"""What the policy gets to see of a run: its snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np

from stretto.core.snapshot import GPU, FloatArray, History, IntArray, Snapshot
from stretto.sim.active import Active
from stretto.sim.machines import Machines
from stretto.sim.trace import Trace
from stretto.sim.world import Settings


class Views:
    """Makes the snapshots of one run. What never changes of a job is gathered once for each set of active jobs."""

    def __init__(self, trace: Trace, settings: Settings) -> None:
        self.trace, self.settings = trace, settings
        n, sd = len(trace), settings.estimate_sd
        normal = np.random.default_rng(settings.seed).standard_normal(n) if sd else np.zeros(n)
        self._error = np.exp(sd * normal - sd * sd / 2)
        self._row: IntArray | None = None
        self._asked: dict[str, Any] = {}
        self._work = np.empty(0)
        self._falls = bool((np.diff(trace.rates, axis=2) < 0).any())

    def snapshot(self, now_s: float, jobs: Active, machines: Machines, history: History) -> Snapshot:
        """The world as the policy sees it now."""
        # The column is replaced when a job comes or goes, and then only.
        if self._row is not jobs.row:
            self._row, self._asked, self._work = jobs.row, self._asked_for(jobs), self.trace.work[jobs.row]
        left = jobs.left_now(now_s)
        if self.trace.phases:
            left = left + jobs.left_later()
        since_s = now_s - jobs.changed_s
        runs = jobs.workers > 0
        return Snapshot(
            now_s=now_s,
            pools=machines.pools,
            capacity=machines.capacity,
            nodes=machines.nodes,
            rates=self.trace.rates,
            falls=self._falls,
            spread_rates=self.trace.spread_rates if jobs.nodes else None,
            history=history,
            **self._asked,
            curve=jobs.curve,
            wanted=jobs.wanted,
            workers=jobs.workers,
            pool=jobs.pool,
            placed=jobs.placed,
            remaining=self._told(left, jobs.row),
            done=self._work - left,
            ran_s=jobs.ran_s + np.where(runs, since_s, 0.0),
            gpu_s=jobs.gpu_s + since_s * jobs.workers * self._asked["width"] / GPU,
            waited_s=jobs.waited_s + np.where(runs, 0.0, since_s),
            started_s=jobs.started_s,
            changed_s=jobs.changed_s,
            restarts=jobs.restarts,
            **self._at_stake(now_s, jobs),
        )

    def _at_stake(self, now_s: float, jobs: Active) -> dict[str, Any]:
        """What stops would do, where they do anything."""
        stakes = jobs.stakes
        if stakes is None:
            return {}
        return {
            "lost_s": jobs.at_stake(now_s)[1],
            "fragile": stakes.fragile[jobs.row],
            "preemptible": stakes.preemptible[jobs.row],
        }

    def _asked_for(self, jobs: Active) -> dict[str, Any]:
        row = jobs.row
        t, n = self.trace, len(row)
        services = np.zeros(n, np.bool_)
        if t.services:
            services = np.array([t.services[r] is not None for r in row.tolist()], np.bool_)
        return {
            "job": row, "klass": t.klass[row], "submit_s": t.submit_s[row], "priority": t.priority[row],
            "deadline_s": t.deadline_s[row], "requested": t.requested[row],
            "min_workers": t.min_workers[row], "max_workers": t.max_workers[row],
            "step": None if t.step is None else t.step[row],
            "width": t.width[row], "fixed_milli": np.zeros(n, np.int64), "demand": t.demand[row],
            "resize_s": jobs.resize_cost_s[row], "start_s": jobs.start_cost_s[row],
            "is_service": services, "remaining_sd": np.full(n, self.settings.estimate_sd),
        }  # fmt: skip

    def _told(self, left: FloatArray, row: IntArray) -> FloatArray:
        """Work left as policies are told it."""
        if self.settings.lengths == "unknown":
            return np.full(len(left), np.nan)
        wrong = self.settings.lengths == "known" and self.settings.estimate_sd
        return left * self._error[row] if wrong else left
