"""A forecast from the middle of a run says what the rest of the run will be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from stretto import plugins
from stretto.core.cycle import CycleState
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy
from stretto.core.snapshot import Snapshot
from stretto.sim import cluster
from stretto.sim.forecast import Forecast, forecast, guessed
from stretto.sim.general import Engine
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings


def run_and_look(policy: Policy, look_s: float) -> tuple[Result, Snapshot, Memory]:
    """A run of jobs that have all come by `look_s`, and what its policy saw, and remembered, then."""
    random = np.random.default_rng(3)
    count, most = 40, 4
    high = random.integers(1, most + 1, count)
    shape = np.arange(most + 1.0) ** random.uniform(0.5, 1.0, count)[:, None]
    trace = Trace.build(
        "made up", [f"j{i}" for i in range(count)], np.sort(random.uniform(0, 0.9 * look_s, count)).tolist(),
        high.tolist(), random.exponential(600.0, count).tolist(), work=random.exponential(600.0, count).tolist(),
        curve=list(range(count)), rates=shape[None], min_workers=[1] * count, max_workers=high.tolist(),
    )  # fmt: skip
    seen: list[tuple[Snapshot, Memory]] = []

    def spy(view: Snapshot, memory: Memory, options: Any) -> Decision:
        if view.now_s >= look_s and not seen:
            seen.append((view, memory))
        return policy.function(view, memory, options)

    spied = msgspec.structs.replace(policy, function=spy, rule=None)
    result = Engine(trace, *cluster.parse("1x8"), spied, Settings()).run()
    return result, *seen[0]


@pytest.mark.parametrize("name", ["fifo", "srtf", "elastic-fifo", "afs-l", "tiresias", "stretto"])
def test_it_is_what_then_happens(name: str) -> None:
    policy = plugins.find(name, {})
    result, view, memory = run_and_look(policy, 2000.0)
    assert len(view) > 5
    foreseen = forecast(view, policy, CycleState(policy=memory))
    truth_s = result.finish_s[view.job] - view.now_s
    apart = np.abs(foreseen.end_s - truth_s) / np.maximum(truth_s, 1.0)
    # Ties of equal moments may fall otherwise after a shift in time.
    assert np.median(apart) < 1e-6, apart
    assert apart.max() < 0.25, apart
    waiting = view.workers == 0
    assert (foreseen.start_s[~waiting] == 0).all()
    assert (foreseen.start_s[waiting] >= 0).all()


def test_a_service_keeps_its_room_and_nobody_says_when_it_ends() -> None:
    policy = plugins.find("fifo", {})
    _, view, memory = run_and_look(policy, 2000.0)
    serves = np.zeros(len(view), np.bool_)
    running = int(np.flatnonzero(view.workers)[0])
    serves[running] = True
    with_service = forecast(msgspec.structs.replace(view, is_service=serves), policy, memory)
    without = forecast(view, policy, memory)
    assert np.isnan(with_service.end_s[running])
    others = ~serves
    assert with_service.end_s[others].max() >= without.end_s[others].max()


def marks(start_s: list[float], end_s: list[float], unknown: list[int], resizable: list[int]) -> tuple[str, str]:
    found = Forecast(np.array(start_s, np.float64), np.array(end_s, np.float64))
    told = guessed(found, np.array(unknown, np.bool_), np.array(resizable, np.bool_))
    return tuple("".join("~" if one else "." for one in column.tolist()) for column in (told.start, told.end))  # type: ignore[return-value]


def test_what_hangs_on_an_unknown_length_is_marked() -> None:
    assert marks([0, 0, 50, 60], [40, 100, 90, 80], [0, 0, 0, 0], [1, 1, 1, 1]) == ("....", "....")
    assert marks([0, 0, 50, 60], [40, 100, 90, 80], [0, 1, 0, 0], [0, 0, 0, 0]) == ("..~~", ".~~~")
    assert marks([0, 0, 50, 60], [40, 100, 90, 80], [0, 0, 1, 0], [0, 0, 0, 0]) == ("...~", "..~~"), (
        "not what came before"
    )
    assert marks([0, 0, 50, 60], [40, 100, 90, 80], [0, 0, 1, 0], [1, 1, 0, 0]) == ("...~", ".~~~"), "may get its room"
    assert marks([0, np.nan], [np.nan, np.nan], [0, 1], [1, 1]) == ("..", ".."), "nobody said anything"
