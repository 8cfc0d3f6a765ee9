"""Figures against hand-computed ones, and what must hold for every run."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core import policy
from stretto.core.snapshot import Nodes
from stretto.sim import cluster, engine, metrics
from stretto.sim.metrics import Metrics
from stretto.sim.trace import Load, Trace
from stretto.sim.world import Failure, Result, Settings


def result_of(trace: Trace, start_s: list[float], finish_s: list[float], **columns: Any) -> Result:
    n = len(trace)
    start, finish = np.array(start_s), np.array(finish_s)
    values: dict[str, Any] = {
        "gpu_s": np.nan_to_num(finish - start) * trace.requested,
        "preemptions": np.zeros(n, np.int64),
        "resizes": np.zeros(n, np.int64),
        "paused_s": np.zeros(n),
        "lost_s": np.zeros(n),
        "lost_to_failures_s": np.zeros(n),
        "rejected": np.isnan(finish),
        "is_service": np.zeros(n, np.bool_),
        "events": 0,
        "decisions": 0,
    }
    return Result(policy="by-hand", start_s=start, finish_s=finish, **(values | columns))


def measured(trace: Trace, nodes: Nodes, result: Result, *failures: Failure) -> Metrics:
    return metrics.measure(trace, trace, nodes, result, failures)


TWO = Trace.build("two", ["a", "b"], [0, 4], [2, 1], [10, 6], deadline_s=[10, 15])
NODES = cluster.uniform(1, 2)[1]


def test_by_hand() -> None:
    """a runs 0-10 on both GPUs, b waits for it and runs 10-16 on one.

    In the fair world a alone does 4 s of its work, then both hold one GPU: b is done at 10, a has 3 s left and
    is done at 13. So a took 10 of 13, b 12 of 6.
    """
    found = measured(TWO, NODES, result_of(TWO, [0, 10], [10, 16]))
    assert (found.jobs, found.finished, found.rejected) == (2, 2, 0)
    assert (found.avg_jct_s, found.p50_jct_s, found.max_jct_s) == (11, 11, 12)
    assert found.p99_jct_s == pytest.approx(11.98)
    assert found.p90_jct_s == pytest.approx(11.8)
    assert (found.avg_wait_s, found.makespan_s) == (3, 16)
    assert found.p99_wait_s == pytest.approx(5.94)
    assert found.utilisation == found.useful_utilisation == pytest.approx(26 / 32)
    assert found.worst_ftf == pytest.approx(2)
    assert found.unfair_share == 0.5
    assert found.deadlines_met == 1
    assert found.lower_bound_makespan_s == pytest.approx(13), "26 GPU-seconds on 2 GPUs"
    assert found.lower_bound_avg_jct_s <= 11


def test_useful_is_less_than_held_when_scaling_is_poor() -> None:
    curve = np.array([[[0.0, 1.0, 1.5]]])
    trace = Trace.build(
        "poor", ["a"], [0], [1], [30], work=[30], curve=[0], rates=curve, min_workers=[1], max_workers=[2]
    )
    result = result_of(trace, [0], [20], gpu_s=np.array([40.0]))
    found = measured(trace, NODES, result)
    assert found.utilisation == 1
    assert found.useful_utilisation == pytest.approx(30 / 40)


def test_what_does_not_exist_is_null() -> None:
    trace = Trace.build("none", ["a"], [0], [1], [10])
    found = measured(trace, NODES, result_of(trace, [math.nan], [math.nan]))
    values = found.plain()
    assert values["rejected"] == 1
    for name in ("avg_jct_s", "p99_jct_s", "avg_wait_s", "makespan_s", "utilisation", "worst_ftf", "deadlines_met"):
        assert values[name] is None, name
    json.dumps(values, allow_nan=False)


def test_rejected_jobs_miss_their_deadline_and_have_no_completion_time() -> None:
    found = measured(TWO, NODES, result_of(TWO, [0, math.nan], [10, math.nan]))
    assert (found.jobs, found.finished, found.rejected, found.deadlines_met) == (2, 1, 1, 1)
    assert found.avg_jct_s == 10
    assert found.lower_bound_avg_jct_s == pytest.approx(10), "of the job that finished"


def test_services_are_not_jobs() -> None:
    load = Load(np.array([0.0]), np.array([1]))
    trace = Trace.build("web", ["a", "web"], [0, 0], [1, 1], [10, 100], services=[None, load])
    found = measured(trace, NODES, result_of(trace, [0, 0], [10, 100], is_service=np.array([False, True])))
    assert (found.jobs, found.services, found.avg_jct_s, found.makespan_s) == (1, 1, 10, 10)
    assert found.utilisation == pytest.approx(110 / 200), "until the service ends too"


def test_nodes_that_were_down_do_not_count() -> None:
    nodes = cluster.uniform(2, 2)[1]
    trace = Trace.build("down", ["a"], [0], [2], [10])
    result = result_of(trace, [0], [10])
    back = measured(trace, nodes, result, Failure(8, 1, True), Failure(5, 1))
    gone = measured(trace, nodes, result, Failure(5, 1), Failure(6, 1), Failure(99, 0))
    assert back.utilisation == pytest.approx(20 / (40 - 2 * 3))
    assert gone.utilisation == pytest.approx(20 / (40 - 2 * 5))


def test_a_clock_that_does_not_start_at_zero() -> None:
    trace = msgspec.structs.replace(TWO, submit_s=TWO.submit_s + 100, deadline_s=TWO.deadline_s + 100)
    before, after = measured(TWO, NODES, result_of(TWO, [0, 10], [10, 16])), result_of(trace, [100, 110], [110, 116])
    down = measured(trace, NODES, after, Failure(1, 0), Failure(50, 0, True))
    for name in ("avg_jct_s", "makespan_s", "utilisation", "worst_ftf", "deadlines_met", "lower_bound_makespan_s"):
        assert getattr(measured(trace, NODES, after), name) == pytest.approx(getattr(before, name)), name
        assert getattr(down, name) == pytest.approx(getattr(before, name)), "what was down before does not count"


def test_jobs_without_work_have_no_fairness() -> None:
    trace = Trace.build("empty", ["a", "b"], [0, 0], [1, 1], [0, 10])
    found = measured(trace, NODES, result_of(trace, [0, 0], [5, 10]))
    assert found.worst_ftf == pytest.approx(1)


def test_percentiles_are_numpys_linear_ones() -> None:
    values = [3.0, 1.0, 50.0, 7.0]
    trace = Trace.build("four", list("abcd"), [0] * 4, [1] * 4, values)
    found = measured(trace, cluster.uniform(1, 4)[1], result_of(trace, [0] * 4, values))
    assert found.p99_jct_s == float(np.percentile(values, 99))
    assert found.p50_jct_s == 5


@given(
    jobs=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4), st.integers(0, 60)), min_size=1, max_size=12),
    name=st.sampled_from(["fifo", "srtf"]),
    start_s=st.sampled_from([0.0, 3.0]),
)
def test_never_below_a_bound(jobs: list[tuple[int, int, int]], name: str, start_s: float) -> None:
    submit, gpus, duration = zip(*jobs, strict=True)
    trace = Trace.build("any", [str(i) for i in range(len(jobs))], submit, gpus, duration)
    pools, nodes = cluster.uniform(1, 4)
    result = engine.simulate(trace, pools, nodes, policy.load(name), Settings(start_s=start_s))
    found = measured(trace, nodes, result)
    slack = 1 + 1e-9
    assert found.lower_bound_avg_jct_s <= found.avg_jct_s * slack + 1e-9
    assert found.lower_bound_makespan_s <= found.makespan_s * slack + 1e-9
    if found.makespan_s:
        assert 0 <= found.useful_utilisation <= found.utilisation * slack <= slack * slack
    json.dumps(found.plain(), allow_nan=False)
    assert list(found.plain())[:16] == list(msgspec.structs.asdict(found))[:16]
