"""Sia: the integer programme against all combinations, its fast ways against the solver, and its rounds."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from policy_checks import answer, check_ends
from strategies import job, nodes_of, snapshots, traces, view_of
from stretto.core.policies import sia
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, IntArray, Snapshot
from stretto.errors import MissingExtra, UsageError
from stretto.sim import sample
from stretto.sim.trace import Trace

POLICY = load("sia")
TYPES = ("fast", "middle", "slow")


def offers(view: Snapshot, **options: Any) -> sia.Choices:
    return sia.configurations(view, view.workers, sia.Options(**options))


def sizes(view: Snapshot, j: int = 0, **options: Any) -> list[int]:
    choices = offers(view, **options)
    return choices.workers[choices.row == j].tolist()


def on_two_types(view: Snapshot, factor: float, second: int) -> Snapshot:
    """The same jobs with another device type beside, `factor` as fast, on one node with `second` devices."""
    return msgspec.structs.replace(
        view,
        pools=("gpu", "other"),
        capacity=np.append(view.capacity, second * GPU),
        nodes=nodes_of([*view.nodes.devices.tolist(), second], [*view.nodes.pool.tolist(), 1]),
        rates=np.concatenate((view.rates, view.rates * factor)),
    )


def worth(choices: sia.Choices, chosen: IntArray) -> float:
    return float(choices.worth[chosen].sum())


def feasible(choices: sia.Choices, chosen: IntArray, capacity: IntArray) -> bool:
    used = np.bincount(choices.pool[chosen], weights=choices.milli[chosen], minlength=len(capacity))
    return bool((used <= capacity).all()) and len(set(choices.row[chosen].tolist())) == len(chosen)


def best_worth(choices: sia.Choices, jobs: int, capacity: IntArray) -> float:
    """Try every combination."""
    options = [[None, *np.flatnonzero(choices.row == j).tolist()] for j in range(jobs)]
    picks = (np.array([c for c in pick if c is not None], np.int64) for pick in itertools.product(*options))
    return max(worth(choices, pick) for pick in picks if feasible(choices, pick, capacity))


@given(snapshots(pools=3))
def test_survives_any_snapshot(view: Snapshot) -> None:
    first = answer("sia", view)
    answer("sia", view, first.memory)
    answer("sia", view, explore=2, round_s=0)


@settings(max_examples=30)
@given(traces())
def test_every_job_ends(trace: Trace) -> None:
    check_ends("sia", trace)


@settings(max_examples=40)
@given(snapshots(pools=2, max_jobs=3))
def test_no_combination_is_worth_more(view: Snapshot) -> None:
    choices = offers(view)
    chosen = sia.solve(choices, len(view), view.capacity, 64)
    assert feasible(choices, chosen, view.capacity)
    best = best_worth(choices, len(view), view.capacity)
    assert best - 1e-9 <= worth(choices, chosen) * (1 + 1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_agrees_with_the_solver_on_one_type(seed: int) -> None:
    view = sample.snapshot(40, 64, seed)
    choices = offers(view)
    exact = sia.solve(choices, len(view), view.capacity, 64)
    solver = sia._by_integer_programme(choices, np.arange(len(choices.row)), len(view), view.capacity)
    assert feasible(choices, exact, view.capacity)
    assert worth(choices, exact) == pytest.approx(worth(choices, solver), rel=1e-4)
    assert worth(choices, exact) >= worth(choices, solver) - 1e-9


@pytest.mark.parametrize(("jobs", "gpus"), [(60, 64), (64, 128), (60, 300)])
@pytest.mark.parametrize(("again", "gap"), [(8, 0.01), (32, 0.0015)])
def test_the_relaxation_loses_little(jobs: int, gpus: int, again: int, gap: float) -> None:
    for seed in range(3):
        view = sample.snapshot(jobs, gpus, seed, types=TYPES)
        choices = offers(view)
        exact = sia.solve(choices, jobs, view.capacity, 64)
        quick = sia.solve(choices, jobs, view.capacity, again)
        assert feasible(choices, quick, view.capacity)
        assert worth(choices, quick) >= worth(choices, exact) * (1 - gap)


def test_configurations_are_powers_of_two_on_a_node_whole_nodes_beyond_and_the_maximum() -> None:
    view = view_of([8, 8, 8, 8], [job(max_workers=30)])
    assert sizes(view) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes(view_of([8, 8], [job(min_workers=3, max_workers=16)])) == [3, 4, 8, 16]
    assert sizes(view_of([8, 8], [job(max_workers=16, workers=5)])) == [1, 2, 4, 5, 8, 16]
    assert sizes(view_of([8, 8], [job(size=6)])) == [6]
    assert sizes(view_of([2, 2], [job(max_workers=9, width=500)])) == [1, 2, 4, 8]


def test_goodput_is_compared_with_the_jobs_own_smallest() -> None:
    view = on_two_types(view_of([4], [job(max_workers=4)]), 2.0, 4)
    choices = offers(view)
    assert list(zip(choices.pool.tolist(), choices.workers.tolist(), strict=True)) == [
        (0, 1), (0, 2), (0, 4), (1, 1), (1, 2), (1, 4),
    ]  # fmt: skip
    assert choices.worth == pytest.approx(1.1 - np.array([1, 2, 4, 2, 4, 8]) ** -0.5)
    decision = POLICY.decide(view, None)
    assert (decision.workers.tolist(), decision.pool.tolist()) == ([4], [1])
    assert decision.reason.tolist() == [Reason.CHOSEN_BY_SOLVER]


def test_a_wide_minimum_counts_for_its_width() -> None:
    choices = offers(view_of([4], [job(size=4)]))
    assert choices.worth == pytest.approx([1.1 - 4**-0.5])


def test_a_restart_must_pay_for_itself() -> None:
    """At age 90 s a third restart of 30 s leaves (90 - 60) / 120 of the goodput: 4 times 1/4 is no more than 1."""

    def grown(age_s: float) -> list[int]:
        one = job(max_workers=4, workers=1, restarts=2, resize_s=30.0, gpu_s=30.0)
        return POLICY.decide(view_of([4], [one], now_s=age_s), None).workers.tolist()

    assert grown(90.0) == [1]
    assert grown(91.0) == [4]


def test_moving_never_looks_worse_than_stopping() -> None:
    """Half the devices are lost; the job has just been restarted, but it shrinks rather than waits."""
    shaken = job(max_workers=4, workers=4, restarts=5, resize_s=30.0, gpu_s=99.0)
    assert POLICY.decide(view_of([2], [shaken], now_s=100.0), None).workers.tolist() == [2]


def test_a_job_that_has_hardly_run_moves_freely() -> None:
    fresh = job(max_workers=4, workers=1, restarts=1, resize_s=30.0, gpu_s=29.0)
    assert POLICY.decide(view_of([4], [fresh], now_s=31.0), None).workers.tolist() == [4]


def test_exploration_at_most_doubles() -> None:
    settings = {"explore": 2}
    policy = load("sia", settings)
    first = policy.decide(view_of([8], [job(max_workers=8)]), None)
    assert first.workers.tolist() == [1]
    for before, after in ((1, 2), (2, 4), (4, 8)):
        now_s = 60.0 * (1 + math.log2(before))
        first = policy.decide(view_of([8], [job(max_workers=8, workers=before)], now_s=now_s), first.memory)
        assert first.workers.tolist() == [after]
    stopped = policy.decide(view_of([8], [job(max_workers=8)], now_s=600.0), first.memory)
    assert stopped.workers.tolist() == [8]


def test_rounds() -> None:
    first = POLICY.decide(view_of([4], [job(max_workers=4)], now_s=61.0), None)
    assert first.wake_s == 120.0
    arrival = view_of([4], [job(max_workers=4, workers=4), job()], now_s=100.0)
    kept = POLICY.decide(arrival, first.memory)
    assert (kept.workers.tolist(), kept.wake_s) == ([4, 0], 120.0)
    lost = msgspec.structs.replace(arrival, capacity=np.array([2 * GPU]))
    assert POLICY.decide(lost, first.memory).workers.sum() == 2
    assert load("sia", {"round_s": 0}).decide(arrival, None).wake_s == math.inf


def test_waiting_jobs_are_told_why() -> None:
    view = view_of([2], [job(size=2, workers=2), job(size=2), job(size=3)])
    decision = POLICY.decide(view, None)
    assert decision.reason.tolist() == [Reason.CHOSEN_BY_SOLVER, Reason.NO_ROOM, Reason.TOO_LARGE]
    assert decision.detail.tolist()[1:] == [[2, 0], [3, 2]]


def test_without_scipy_one_type_works_and_several_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    one = view_of([4], [job(max_workers=4)])
    assert POLICY.decide(one, None).workers.tolist() == [4]
    with pytest.raises(MissingExtra, match=r"stretto\[solver\]"):
        POLICY.decide(on_two_types(one, 2.0, 4), None)


def test_options_that_would_leave_jobs_out_are_refused() -> None:
    with pytest.raises(UsageError, match="penalty"):
        load("sia", {"penalty": 0.9})
