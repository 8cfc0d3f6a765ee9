"""The incremental runner and the general engine must leave exactly the same behind, for every list policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.policy import load
from stretto.sim import cluster, engine, listrun
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("fifo", {}),
    ("fit-first", {}),
    ("sjf", {}),
    ("srtf", {}),
    ("srtf", {"original": True}),
    ("srsf", {}),
    ("srsf", {"original": True}),
    ("srjf", {}),
    ("edf", {}),
    ("priority", {}),
    ("tiresias", {"queues": (4.0, 9.0)}),
    ("tiresias", {"queues": (4.0, 9.0), "original": True}),
    ("tiresias", {"queues": (3.0,), "promote": 0.5}),
    ("tiresias", {"queues": (3.0, 7.0), "promote": 1.0, "original": True}),
    ("tiresias", {"queues": (2.0, 4.0), "service": "time", "promote": 2.0}),
    ("tiresias", {"queues": (2.0, 4.0), "service": "time", "original": True}),
    ("tiresias-gittins", {"queues": (4.0, 9.0), "sample": (1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0)}),
    ("tiresias-gittins", {"queues": (4.0,), "sample": (1.0, 3.0, 8.0), "quantum": 2.0, "promote": 1.0}),
    ("tiresias-gittins", {"queues": (4.0, 9.0), "sample": (2.0, 3.0, 5.0, 8.0), "quantum": 3.0, "original": True}),
]
NAMES = [f"{name} {options}" for name, options in POLICIES]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few jobs with many ties: equal submissions, sizes, lengths (also none), priorities and deadlines."""
    n = draw(st.integers(1, 14))
    unit = draw(st.sampled_from([1.0, 0.5, 0.1]))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=n, max_size=n))

    return Trace.build(
        "random",
        [str(i) for i in range(n)],
        [unit * t for t in column(st.integers(0, 12))],
        column(st.sampled_from([1, 1, 2, 3, 4])),
        [unit * d for d in column(st.integers(0, 15))],
        priority=column(st.integers(0, 2)),
        deadline_s=column(st.sampled_from([5.0, 9.0, 20.0, float("inf")])),
        width_milli=column(st.sampled_from([1000, 1000, 500])),
    )


def assert_same(ours: Result, general: Result) -> None:
    for field in ("start_s", "finish_s", "gpu_s", "paused_s"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(general, field), field)
    for field in ("preemptions", "resizes", "rejected", "is_service", "events", "decisions", "changes"):
        np.testing.assert_equal(getattr(ours, field), getattr(general, field), field)


@pytest.mark.parametrize(("name", "options"), POLICIES, ids=NAMES)
@given(trace=traces(), gpus=st.integers(4, 9), start_s=st.sampled_from([0.0, 0.0, 1.5]))
@settings(max_examples=60, deadline=None)
def test_equals_the_general_engine(name: str, options: dict[str, Any], trace: Trace, gpus: int, start_s: float) -> None:
    policy = load(name, options)
    pools, nodes = cluster.uniform(1, gpus)
    world = Settings(start_s=start_s, record=True)
    assert listrun.applies(trace, pools, policy, world)
    ours = listrun.run(trace, pools, nodes, policy, world, None)
    general = engine.Engine(trace, pools, nodes, policy, world).run()
    assert_same(ours, general)
