"""Worlds in which policies are asked at fixed times only, and in which speed depends on the nodes a job spans."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from strategies import trace_of
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, load, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import IntArray, Snapshot
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace
from stretto.sim.world import Settings


def run(trace: Trace, name: str, shape: str = "1x2", **settings: object) -> tuple[list[float], list[float]]:
    """First starts and ends."""
    world = msgspec.convert(settings, Settings)
    result = simulate(trace, *cluster.parse(shape), load(name), world)
    return result.start_s.tolist(), result.finish_s.tolist()


JOBS = [{"submit_s": 0.0, "work": 50.0}, {"submit_s": 7.0, "work": 5.0}, {"submit_s": 9.0, "work": 10.0}]


def test_between_slots_nobody_starts() -> None:
    """The second job ends at 15, in the middle of a slot; the third starts at the next multiple of 10."""
    starts, ends = run(trace_of(JOBS), "fifo", slot_s=10.0)
    assert starts == [0.0, 10.0, 20.0]
    assert ends == [50.0, 15.0, 30.0]


def test_without_slots_everybody_starts_at_once() -> None:
    starts, ends = run(trace_of(JOBS), "fifo")
    assert starts == [0.0, 7.0, 12.0]
    assert ends == [50.0, 12.0, 22.0]


def test_a_policy_is_woken_at_the_slot_after_its_time() -> None:
    """Demoted to the second queue after 5 s, the first job gives way at 10, not before."""
    jobs = [{"submit_s": 0.0, "work": 100.0, "requested": 2}, {"submit_s": 1.0, "work": 4.0, "requested": 2}]
    trace = trace_of(jobs).rigid()
    world = Settings(slot_s=10.0)
    result = simulate(trace, *cluster.parse("1x2"), load("tiresias", {"queues": "10"}), world)
    assert result.start_s.tolist() == [0.0, 10.0]
    # Half the time on two workers; it may go on at 20, the slot after the other's end.
    assert result.finish_s.tolist() == [10.0 + 40.0 + 10.0, 12.0]


@policy("put-apart", traits=Traits(elastic=True))
def put_apart(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Two workers for each job, on two nodes."""
    nodes: IntArray = np.ones((len(view), 2), np.int64)
    return Decision.of(view, nodes.sum(axis=1), np.full(len(view), int(Reason.RUNS)), nodes=nodes)


def spread_trace() -> Trace:
    """A job that runs twice as fast on two workers of one node, and slower than alone on two nodes."""
    trace = trace_of([{"work": 120.0, "max_workers": 2}])
    by_nodes = np.repeat(trace.rates[..., None], 3, axis=3)
    by_nodes[:, :, 2, 2] = 0.5
    return msgspec.structs.replace(trace, spread_rates=by_nodes)


def test_a_job_runs_at_the_speed_of_its_place() -> None:
    trace = spread_trace()
    assert run(trace, "put-apart", "2x2", placement="pack") == ([0.0], [240.0])
    assert run(trace, "elastic-fifo", "2x2", placement="pack") == ([0.0], [60.0])
    assert run(trace, "elastic-fifo", "2x2") == ([0.0], [60.0]), "where GPUs are counted it is on the fewest nodes"


def test_a_rigid_job_slows_down_in_proportion() -> None:
    trace = spread_trace().rigid()
    assert trace.work.tolist() == [60.0]
    assert run(trace, "put-apart", "2x2", placement="pack") == ([0.0], [240.0])
    assert run(trace, "fifo", "2x2", placement="pack") == ([0.0], [60.0])


def test_the_best_rates_count_the_best_place() -> None:
    trace = spread_trace()
    assert trace.best_rates.tolist() == [[0.0, 1.0, 2.0]]
    assert trace.spread_rates is not None
    faster = msgspec.structs.replace(trace, spread_rates=trace.spread_rates * [1.0, 1.0, 10.0])
    assert faster.best_rates.tolist() == [[0.0, 10.0, 5.0]]


def test_one_measured_type_stands_for_all_of_a_mixed_cluster() -> None:
    pools, nodes = cluster.mixed({"a": 2, "b": 2}, gpus=2)
    result = simulate(spread_trace(), pools, nodes, load("elastic-fifo"), Settings(placement="pack"))
    assert result.finish_s.tolist() == pytest.approx([60.0])
