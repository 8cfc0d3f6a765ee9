"""Pollux: limits always hold, the value is the published one, and the search finds the best where that can be told."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import job, snapshots, trace_of, view_of
from stretto.core import invariants
from stretto.core.policies.pollux import Problem, Searched
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.services import only
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.world import Settings

QUICK = load("pollux", {"population": 8, "generations": 4})
POLICY = load("pollux", {"population": 40, "generations": 40})


def on_nodes(gpus: list[int], jobs: list[dict[str, Any]], placed: list[list[int]], **columns: Any) -> Snapshot:
    """A snapshot with places: `placed[j]` are the workers of job j on each node."""
    for j, where in zip(jobs, placed, strict=True):
        j["workers"] = sum(where)
    view = view_of(gpus, jobs, **columns)
    return msgspec.structs.replace(view, placed=np.array(placed, np.int64).reshape(len(jobs), len(gpus)))


def slow_value(view: Snapshot, state: list[list[int]]) -> float:
    """The definition, job by job."""
    total = 0.0
    for j, where in enumerate(state):
        rates = view.rates[0, view.curve[j]]
        fair = min(max(1, -(-view.total_milli // int(view.width[j] * len(view)))), len(rates) - 1)
        workers = sum(where)
        nodes = sum(w > 0 for w in where)
        speed = rates[min(workers, len(rates) - 1)]
        if view.spread_rates is not None:
            speed = view.spread_rates[0, view.curve[j], workers, nodes]
        elif nodes > 1:
            speed *= 1 - 0.001 * (nodes - 1)
        counted = speed / (rates[fair] or rates.max() or 1.0)
        if where != view.placed[j].tolist():
            age, cost = view.now_s - view.submit_s[j], view.resize_s[j] if view.workers[j] else view.start_s[j]
            counted *= max(age - max(view.restarts[j] - 1, 0) * cost, 0) / (age + cost) if age + cost > 0 else 1.0
        total += 1 / (counted + 0.004)
    return len(state) / total


def states_of(view: Snapshot) -> list[list[list[int]]]:
    """Every placement there is on small nodes."""
    devices = view.nodes.devices.tolist()
    rows = [list(row) for row in itertools.product(*(range(d + 1) for d in devices))]
    found = []
    for state in itertools.product(*(rows for _ in range(len(view)))):
        total = [sum(column) for column in zip(*state, strict=True)]
        if any(t > d for t, d in zip(total, devices, strict=True)):
            continue
        spread = [row for row in state if sum(w > 0 for w in row) > 1]
        if any(sum(row[k] > 0 for row in spread) > 1 for k in range(len(devices))):
            continue
        found.append([list(row) for row in state])
    return found


def check_places(view: Snapshot, nodes: Any, workers: Any) -> None:
    assert nodes.sum(axis=1).tolist() == workers.tolist()
    assert ((nodes * view.width[:, None]).sum(axis=0) <= view.nodes.devices * GPU).all()
    spread = (nodes > 0) & ((nodes > 0).sum(axis=1) > 1)[:, None]
    assert (spread.sum(axis=0) <= 1).all(), "two jobs that span nodes share one"


@settings(max_examples=60)
@given(snapshots(pools=2, services=True))
def test_every_limit_holds_where_gpus_are_counted(view: Snapshot) -> None:
    decision = QUICK.decide(view, None)
    invariants.check(QUICK, view, decision)
    assert decision.nodes is None
    again = QUICK.decide(view, None)
    assert again.workers.tolist() == decision.workers.tolist()


@settings(max_examples=60)
@given(snapshots(placed=True), st.integers(0, 3))
def test_every_limit_holds_on_nodes_and_from_round_to_round(view: Snapshot, gone: int) -> None:
    decision = QUICK.decide(view, None)
    invariants.check(QUICK, view, decision)
    if not view.placed.shape[1]:
        return
    check_places(view, decision.nodes, decision.workers)
    # Some jobs end, the others run where they were put.
    keep = np.arange(len(view)) >= gone
    nodes = np.array(decision.nodes)
    later = msgspec.structs.replace(
        only(msgspec.structs.replace(view, placed=nodes, workers=decision.workers), keep), now_s=decision.wake_s
    )
    later = msgspec.structs.replace(later, pool=np.where(later.workers > 0, 0, -1))
    second = QUICK.decide(later, decision.memory)
    invariants.check(QUICK, later, second)
    check_places(later, second.nodes, second.workers)
    most = np.maximum(2 * np.maximum(view.workers[keep], later.workers), later.min_workers)
    assert (second.workers <= most).all(), "more than twice of what it ever had"


@settings(max_examples=40)
@given(snapshots(placed=True), st.randoms(use_true_random=False))
def test_the_value_is_the_definition(view: Snapshot, random: Any) -> None:
    if not len(view) or not view.placed.shape[1]:
        return
    problem = Problem(view, view.max_workers)
    raw = np.array([[[random.randint(0, 4) for _ in view.nodes.name] for _ in view.job] for _ in range(5)])
    states = problem.repair(raw, np.arange(len(view.nodes.name)))
    back = np.argsort(problem.order)
    for state, value in zip(states, problem.value(states), strict=True):
        check_places(view, state[back], state[back].sum(axis=1))
        assert value == pytest.approx(slow_value(view, state[back].tolist()))


CURVES = ([0, 1, 1.8, 2.4, 2.8], [0, 1, 1.1, 1.2, 1.2], [0, 1, 2, 3, 4], [0, 2, 2.5, 2.6, 2.6])


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_best_of_all_placements(seed: int) -> None:
    random = np.random.default_rng(seed)
    jobs = [
        job(
            max_workers=4,
            rate=CURVES[int(random.integers(4))],
            submit_s=float(random.integers(100)),
            resize_s=30.0,
            start_s=30.0,
            restarts=int(random.integers(1, 4)),
        )
        for _ in range(3)
    ]
    view = on_nodes([2, 2], jobs, [[1, 0], [0, 2], [0, 0]], now_s=240.0)
    # What was seen before leaves room up to the maximum.
    memory = Searched(0.0, seed, view.job, view.max_workers, np.zeros((0, 3, 2), np.int64))
    decision = POLICY.decide(view, memory)
    assert decision.nodes is not None
    best = max(slow_value(view, state) for state in states_of(view))
    assert slow_value(view, decision.nodes.tolist()) == pytest.approx(best)


def test_a_lone_job_doubles_every_round() -> None:
    memory, workers, sizes = None, [0, 0], []
    for number in range(1, 5):
        view = on_nodes([4, 4], [job(max_workers=8)], [workers], now_s=60.0 * number)
        decision = POLICY.decide(view, memory)
        assert decision.nodes is not None
        memory, workers = decision.memory, decision.nodes[0].tolist()
        sizes.append(sum(workers))
        assert decision.wake_s == 60.0 * (number + 1)
    assert sizes == [1, 2, 4, 8]


def test_between_rounds_everything_stays() -> None:
    first = POLICY.decide(on_nodes([4], [job(max_workers=4)], [[0]], now_s=60.0), None)
    between = on_nodes([4], [job(max_workers=4), job(max_workers=4, submit_s=70.0)], [[1], [0]], now_s=75.0)
    decision = POLICY.decide(between, first.memory)
    assert decision.workers.tolist() == [1, 0]
    assert decision.nodes is not None
    assert decision.nodes.tolist() == [[1], [0]]
    assert decision.reason.tolist() == [Reason.WAITS_FOR_ROUND] * 2
    assert decision.wake_s == 120.0


def test_a_job_that_was_moved_too_often_stays() -> None:
    """Twice the workers would double its speed, but 100 s with two restarts of 30 s count for 40 / 130 only."""
    for restarts, expected in ((1, 2), (3, 1)):
        jobs = [job(max_workers=2, resize_s=30.0, restarts=restarts)]
        assert POLICY.decide(on_nodes([2], jobs, [[1]], now_s=100.0), None).workers.tolist() == [expected]


def test_spread_rates_keep_a_job_together() -> None:
    """Spread, the job would be slower than on one worker; it waits with one until a node is free."""
    jobs = [job(max_workers=2), job(max_workers=1), job(max_workers=1)]
    view = on_nodes([2, 2], jobs, [[1, 0], [1, 0], [0, 1]], now_s=1e6)
    by_nodes = np.repeat(view.rates[..., None], 3, axis=3)
    by_nodes[..., 2] *= 0.4
    moved = POLICY.decide(msgspec.structs.replace(view, spread_rates=by_nodes), None)
    assert moved.workers.tolist() == [2, 1, 1]
    assert moved.nodes is not None
    assert np.count_nonzero(moved.nodes[0]) == 1


@pytest.mark.parametrize("seed", range(3))
def test_jobs_that_need_all_nodes_get_their_turn(seed: int) -> None:
    wide = {"work": 800.0, "min_workers": 16, "max_workers": 16, "requested": 16}
    jobs = [{"work": 2000.0, "max_workers": 16}, wide, {"work": 500.0, "max_workers": 8, "submit_s": 30.0}, wide]
    policy = load("pollux", {"population": 10, "generations": 10, "seed": seed})
    world = Settings(start_s=30.0, resize_s=30.0, placement="pack")
    result = simulate(trace_of(jobs), *cluster.parse("4x4"), policy, world)
    assert (result.finish_s < 1500.0).all()


def test_nothing_to_do_and_nothing_to_give() -> None:
    for view in (view_of(4, [], now_s=5.0), view_of(0, [job()], now_s=5.0)):
        decision = POLICY.decide(view, None)
        assert decision.workers.sum() == 0
        assert decision.wake_s == 60.0


def test_waiting_jobs_are_told_what_was_missing() -> None:
    jobs = [job(size=2, gpu_s=50.0), job(size=2, submit_s=1.0)]
    decision = POLICY.decide(on_nodes([3], jobs, [[0], [0]], now_s=600.0), None)
    assert sorted(decision.workers.tolist()) == [0, 2]
    waiting = int(np.argmin(decision.workers))
    assert decision.reason[waiting] == Reason.NO_ROOM
    assert decision.detail[waiting].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("options", [{"round_s": 0}, {"population": 0}, {"generations": 0}, {"seed": -1}])
def test_impossible_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        load("pollux", options)
