"""AFS-L against the tournament as it is defined, played from the start for every single grant."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from policy_checks import answer, check_ends, check_uncontended, check_work_conserving
from strategies import job, snapshots, traces, view_of
from stretto.core import marginal
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot
from stretto.sim import cluster, readers, sample
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace

DATA = Path(__file__).parents[2] / "data"
POLICY = load("afs-l")


class Naive:
    """The definition, word for word."""

    def __init__(self, view: Snapshot) -> None:
        self.view, self.steps = view, marginal.lengths(view)
        self.n, self.free = [0] * len(view), view.total_milli

    def run(self) -> list[int]:
        while players := [j for j in range(len(self.n)) if self.may_grow(j)]:
            champion = players[0]
            for challenger in players[1:]:
                if self.beats(challenger, champion):
                    champion = challenger
            self.free -= self.price(champion)
            self.n[champion] = self.after(champion)
        return self.n

    def may_grow(self, j: int) -> bool:
        return self.after(j) > self.n[j] and self.price(j) <= self.free

    def after(self, j: int) -> int:
        if not self.n[j]:
            return int(self.view.min_workers[j])
        larger = range(self.n[j] + 1, int(self.view.max_workers[j]) + 1)
        return next((n for n in larger if self.speed(j, n) > self.now(j)), 0)

    def price(self, j: int) -> int:
        fixed = 0 if self.n[j] else int(self.view.fixed_milli[j])
        return (self.after(j) - self.n[j]) * int(self.view.width[j]) + fixed

    def speed(self, j: int, n: int) -> float:
        row = self.view.rates[0, self.view.curve[j]]
        return float(row[min(n, len(row) - 1)])

    def now(self, j: int) -> float:
        return self.speed(j, self.n[j])

    def gain(self, j: int, *, over_then: bool) -> float:
        now, then = self.now(j), self.speed(j, self.after(j))
        if not self.n[j]:
            return 1.0
        return (then - now) / (then if over_then else now) / (self.after(j) - self.n[j])

    def left_s(self, j: int, n: int) -> float:
        return float(self.steps[j]) / self.speed(j, n) if n else math.inf

    def beats(self, j: int, champion: int) -> bool:
        if not self.n[j] and not self.n[champion]:
            return self.left_s(j, self.after(j)) < self.left_s(champion, self.after(champion))
        shorter = self.left_s(j, self.n[j]) < self.left_s(champion, self.n[champion])
        a, b = (j, champion) if shorter else (champion, j)
        return (b if self.gain(b, over_then=True) > self.gain(a, over_then=False) else a) == j


@given(snapshots())
def test_equals_the_definition(view: Snapshot) -> None:
    assert answer("afs-l", view).workers.tolist() == Naive(view).run()


@settings(max_examples=30)
@given(traces())
def test_every_job_ends(trace: Trace) -> None:
    check_ends("afs-l", trace)


@pytest.mark.parametrize(("jobs", "gpus"), [(40, 60), (60, 40), (12, 200)])
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_definition_on_realistic_jobs(jobs: int, gpus: int, seed: int) -> None:
    view = sample.snapshot(jobs, gpus, seed)
    assert POLICY.decide(view, None).workers.tolist() == Naive(view).run()


def test_by_hand() -> None:
    """Three GPUs: both jobs get one; then a (100 s left) would gain 0.5 / 1, b (200 s left) 0.9 / 1.9 < 0.5."""
    view = view_of(
        3, [job(max_workers=4, rate=[0, 1, 1.5], remaining=100), job(max_workers=4, rate=[0, 1, 1.9], remaining=200)]
    )
    assert POLICY.decide(view, None).workers.tolist() == [2, 1]
    steeper = view_of(
        3, [job(max_workers=4, rate=[0, 1, 1.4], remaining=100), job(max_workers=4, rate=[0, 1, 1.9], remaining=200)]
    )
    assert POLICY.decide(steeper, None).workers.tolist() == [1, 2]


def test_the_shortest_start_first_and_one_that_doubles_goes_before_them() -> None:
    rate = [0, 1, 1.9, 2.7]
    view = view_of(2, [job(max_workers=3, rate=rate, remaining=r) for r in (300, 100, 200)])
    decision = POLICY.decide(view, None)
    assert decision.workers.tolist() == [0, 1, 1]
    assert decision.reason.tolist() == [Reason.NO_ROOM, Reason.RUNS, Reason.RUNS]
    linear = view_of(2, [job(max_workers=3, remaining=r) for r in (300, 100, 200)])
    assert POLICY.decide(linear, None).workers.tolist() == [0, 2, 0]


def test_a_minimum_is_granted_whole_or_not_at_all() -> None:
    rate = [0, 0, 0, 3, 3.5]
    view = view_of(
        4, [job(max_workers=4, rate=[0, 1, 1.5, 1.8], remaining=20), job(min_workers=3, max_workers=4, rate=rate)]
    )
    assert POLICY.decide(view, None).workers.tolist() == [1, 3]
    tight = view_of(
        3, [job(max_workers=4, rate=[0, 1, 1.5, 1.8], remaining=20), job(min_workers=3, max_workers=4, rate=rate)]
    )
    assert POLICY.decide(tight, None).workers.tolist() == [3, 0]


def test_workers_that_gain_nothing_are_not_granted() -> None:
    view = view_of(9, [job(max_workers=9, rate=[0, 1, 2, 2, 2]), job(max_workers=2, rate=[0, 1, 1.5])])
    assert POLICY.decide(view, None).workers.tolist() == [2, 2]
    again = view_of(9, [job(max_workers=9, rate=[0, 1, 2, 2], workers=2), job(max_workers=2, rate=[0, 1], workers=1)])
    assert POLICY.decide(again, None).reason.tolist() == [Reason.NO_USE_FOR_MORE] * 2


def test_a_plateau_is_crossed_in_one_grant_at_its_gain_per_worker() -> None:
    """Job 0 would gain 2.4 / 1 for three workers, 0.8 each; job 1, longer, 0.4 / 1.4 for one, then 0.1 / 1.5."""
    level = job(max_workers=4, rate=[0, 1, 1, 1, 3.4], remaining=100)
    steady = job(max_workers=3, rate=[0, 1, 1.4, 1.5], remaining=200)
    assert POLICY.decide(view_of(5, [level, steady]), None).workers.tolist() == [4, 1]
    assert POLICY.decide(view_of(4, [level, steady]), None).workers.tolist() == [1, 3]


@given(snapshots())
def test_nothing_useful_stays_free(view: Snapshot) -> None:
    check_work_conserving("afs-l", view)
    check_uncontended("afs-l", view)


def test_published_mean_completion_of_the_elastic_itp_jobs() -> None:
    """17,957 s on 64 GPUs at zero cost."""
    trace = readers.read(DATA / "itp" / "cluster01.csv", "itp")
    result = simulate(trace, *cluster.parse("8x8"), POLICY)
    assert np.mean(result.finish_s - trace.submit_s) == pytest.approx(17_957, rel=1e-3)
