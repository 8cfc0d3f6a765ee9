"""Random simulated histories under policies that preempt: nobody loses its work to an equal, and nobody starves.

Jobs that begin again from nothing, go on from their last checkpoint or lose nothing, on eight GPUs, of one or three
priorities. `Watched` looks at every decision: what the policy wanted, what the cycle made of it, what it cost whom.

The bound on waiting is that of `core.reservations`. After its promised start no fragile job passes a job with a
reservation, but for more urgent ones and those whose reservations come first; and when the fragile jobs have ended that
run then, the next decision starts it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import watched
from strategies import trace_of
from stretto.core import reservations
from stretto.core.decision import Decision
from stretto.core.snapshot import BoolArray, IntArray, Snapshot
from stretto.sim import cluster, engine, levels
from stretto.sim.general import Engine
from stretto.sim.trace import ELASTIC, RESTART, RIGID, Trace
from stretto.sim.world import Settings

POLICIES: dict[str, dict[str, Any]] = {
    "srtf": {},
    "srsf": {},
    "tiresias": {"queues": (60.0, 300.0)},
    "round-robin": {"quantum_s": 20.0},
    "priority": {},
    "afs-l": {},
    "stretto": {},
    "optimus": {},
    "elastic-srtf": {},
    "elastic-tiresias": {},
    "gavel": {"round_s": 30.0, "reset_s": 60.0},
    "themis": {"lease_s": 40.0},
    "sia": {"round_s": 30.0},
}
SEEDS = range(3)
RESERVE_S = 30.0
HAIR_S = 1e-6


def history(seed: int, priorities: int, jobs: int = 40) -> Trace:
    """Rather more work than eight GPUs can do at a time."""
    draw = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    submit_s = 0.0
    for _ in range(jobs):
        submit_s += float(draw.exponential(25.0))
        size = int(draw.choice([1, 1, 2, 4, 6]))
        most = min(8, size * int(draw.choice([1, 2, 4])))
        work = float(draw.integers(5, 240)) * size
        least = 1 if most > size else size
        one = {"work": work, "requested": size, "min_workers": least, "max_workers": most}
        rows.append({**one, "submit_s": round(submit_s, 1)})
    return msgspec.structs.replace(
        trace_of(rows),
        level=draw.choice([RIGID, RESTART, ELASTIC], jobs, p=[0.4, 0.3, 0.3]),
        checkpoint_s=draw.choice([0.0, 10.0, 60.0, math.inf], jobs),
        preemptible=np.where(draw.random(jobs) < 0.3, 1, -1),
        priority=draw.integers(0, priorities, jobs),
        start_s=draw.choice([0.0, 2.0], jobs),
    )


class Watched(Engine):
    """A run that notes what its decisions did to those who would lose work."""

    def __init__(self, trace: Trace, name: str, world: Settings) -> None:
        self.log: list[tuple[Snapshot, Decision]] = []
        policy = watched(name, self.log, **POLICIES[name])
        jobs = engine.seen_by(policy, levels.settled(trace, world), ("gpu",))
        super().__init__(jobs, *cluster.parse("1x8"), policy, world)
        self.kept = self.losses = self.reserved = 0
        """Stops and resizes of pinned jobs that the policy wanted and did not get; work that was lost; jobs that had a
        reservation and started in time."""
        self.robbed: list[str] = []
        self.starved: list[str] = []
        self.until_s: dict[int, float] = {}
        """When jobs with reservations must have started, by number."""

    def ask_and_act(self) -> None:
        if not len(self.jobs):
            return super().ask_and_act()
        self.log.clear()
        before_s, blocked = self.jobs.tally.lost_s.copy(), self.state.blocked
        view = self.views.snapshot(self.now_s, self.jobs, self.machines, self.history)
        super().ask_and_act()
        after = self._after(view)
        self._judge_losses(view, after, (self.jobs.tally.lost_s - before_s)[view.job])
        if self.log and view.lost_s is not None:
            wish = self.log[0][1].workers
            self.kept += int((view.pinned & (wish != view.workers) & (after == view.workers)).sum())
            self._judge_waits(view, after, blocked)
        return None

    def _after(self, view: Snapshot) -> IntArray:
        has = dict(zip(self.jobs.row.tolist(), self.jobs.workers.tolist(), strict=True))
        return np.array([has.get(number, 0) for number in view.job.tolist()], np.int64)

    def _judge_losses(self, view: Snapshot, after: IntArray, lost_s: Any) -> None:
        """Work of two starts is weighed like a start; what is more may only be lost to somebody more urgent, who starts
        or grows by it."""
        for j in np.flatnonzero(lost_s > 2 * view.start_s + HAIR_S).tolist():
            self.losses += 1
            came = (view.priority > view.priority[j]) & (after > view.workers)
            assert view.preemptible is not None
            if not came.any() or not view.preemptible[j]:
                self.robbed.append(f"job {view.job[j]} lost {lost_s[j]:.1f} s at {self.now_s:.1f} s")

    def _judge_waits(self, view: Snapshot, after: IntArray, blocked: reservations.Blocked) -> None:
        """`blocked`: before this decision."""
        assert view.fragile is not None
        came = (view.workers == 0) & (after > 0)
        self.reserved += sum(number in self.until_s for number in view.job[came].tolist())
        promised = {number: wait for number, wait in self.state.blocked.items() if wait.is_promised}
        still = (view.workers == 0) & (after == 0)
        waiting = [j for j in np.flatnonzero(still).tolist() if int(view.job[j]) in promised]
        self.until_s = {n: self.until_s.get(n, 0.0) for n in view.job[waiting].tolist()}
        for j in waiting:
            number, wait = int(view.job[j]), promised[int(view.job[j])]
            before = (view.priority > view.priority[j]) | self._precede(view, j, {**blocked, **self.state.blocked})
            counts = view.fragile & (after > 0)
            if self.now_s > wait.promised_s + HAIR_S:
                counts &= came
                passed = view.job[counts & ~before].tolist()
                self.starved += [f"job {n} passes {number} at {self.now_s:.1f} s" for n in passed]
            until_s = max(self.until_s[number], wait.promised_s, self._ends_s(view.job[counts]))
            self.until_s[number] = until_s
            comes_first = before & ((after > 0) | np.isin(view.job, list(promised)))
            if self.now_s > until_s + HAIR_S and not comes_first.any():
                self.starved.append(f"job {number} waits at {self.now_s:.1f} s, not only to {until_s:.1f} s")

    def _precede(self, view: Snapshot, j: int, blocked: reservations.Blocked) -> BoolArray:
        """Whose reservations come before that of job j, among equals."""
        rank = blocked[int(view.job[j])].since_s, int(view.job[j])
        earlier = [number for number, wait in blocked.items() if (wait.since_s, number) < rank]
        found: BoolArray = np.isin(view.job, earlier) & (view.priority == view.priority[j])
        return found

    def _ends_s(self, numbers: IntArray) -> float:
        """When the last of these jobs really ends."""
        return float(self.jobs.finish_s[np.isin(self.jobs.row, numbers)].max(initial=self.now_s))


def played(name: str, seed: int, priorities: int, **world: Any) -> Watched:
    run = Watched(history(seed, priorities), name, Settings(reserve_after_s=RESERVE_S, **world))
    run.run()
    return run


@lru_cache
def all_played(name: str) -> tuple[Watched, ...]:
    """Every other history with lengths that are wrong by a factor of about three."""
    return tuple(played(name, seed, priorities, estimate_sd=float(seed % 2)) for seed in SEEDS for priorities in (1, 3))


@pytest.mark.parametrize("name", POLICIES)
def test_nobody_loses_its_work_to_an_equal_and_nobody_starves(name: str) -> None:
    for run in all_played(name):
        assert not run.robbed
        assert not run.starved
        assert np.isfinite(run.result().finish_s).all()
    assert sum(run.kept for run in all_played(name)) > 0, "the policy wanted too little to show anything"


def test_policies_often_wanted_what_they_did_not_get() -> None:
    """So that the test above says something: of stops and resizes kept from policies, of work that was rightly lost to
    more urgent jobs, and of reservations there are many."""
    runs = [run for name in POLICIES for run in all_played(name)]
    assert sum(run.kept for run in runs) >= 1000
    assert sum(run.losses for run in runs) >= 20
    assert sum(run.reserved for run in runs) >= 50


@pytest.mark.parametrize("name", ["srtf", "tiresias", "afs-l", "stretto", "themis", "sia"])
def test_the_same_histories_lose_work_where_that_is_allowed(name: str) -> None:
    """So that the test above can fail."""
    assert any(played(name, seed, 1, stops_lose_work=True).robbed for seed in SEEDS)


@settings(max_examples=15)
@given(
    name=st.sampled_from(list(POLICIES)),
    seed=st.integers(10, 100_000),
    priorities=st.sampled_from([1, 3]),
    estimate_sd=st.sampled_from([0.0, 1.0]),
)
def test_in_any_history(name: str, seed: int, priorities: int, estimate_sd: float) -> None:
    run = played(name, seed, priorities, estimate_sd=estimate_sd)
    assert not run.robbed
    assert not run.starved
