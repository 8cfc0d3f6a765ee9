"""Neighbours that slow each other down: by hand, and never faster than alone."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import run, watched
from strategies import trace_of, traces
from stretto.core.snapshot import GPU
from stretto.sim import cluster, contention
from stretto.sim.engine import simulate
from stretto.sim.trace import RESTART, UNSAID, Trace
from stretto.sim.world import Settings


def speeds(placed: list[list[int]], width: list[int], devices: list[int], factor: float = 1.0) -> list[float]:
    found = contention.speeds(np.array(placed), np.array(width), np.array(devices), factor)
    return found.tolist()


def test_alone_on_its_node_a_job_has_its_own_speed() -> None:
    assert speeds([[2, 0], [0, 2]], [GPU, GPU], [4, 4]) == [1, 1]
    assert speeds([], [], [4]) == []


def test_what_others_hold_of_the_node_counts() -> None:
    """Two of four GPUs, and one of four."""
    assert speeds([[1, 0], [2, 0]], [GPU, GPU], [4, 4]) == pytest.approx([1 / 1.5, 1 / 1.25])
    assert speeds([[1, 0], [2, 0]], [GPU, GPU], [4, 4], 0.5) == pytest.approx([1 / 1.25, 1 / 1.125])


def test_the_slowest_node_decides() -> None:
    assert speeds([[1, 1], [3, 0], [0, 1]], [GPU, GPU, GPU], [4, 4])[0] == pytest.approx(1 / 1.75)


def test_parts_of_a_gpu_share_as_few_gpus_as_hold_them() -> None:
    """Four quarters are one GPU: three quarters of it belong to others. A fifth makes it two GPUs."""
    assert speeds([[1]] * 4, [250] * 4, [8]) == pytest.approx([1 / 1.75] * 4)
    assert speeds([[1]] * 5, [250] * 5, [8]) == pytest.approx([1 / 1.5] * 5)
    assert speeds([[1], [4]], [250, GPU], [8]) == pytest.approx([1 / 1.5, 1 / (1 + 0.25 / 8)])


def test_a_job_speeds_up_when_its_neighbour_ends() -> None:
    """One GPU each of two: at 2/3 speed until the short one ends at 30, with 80 left for the other."""
    trace = trace_of([{"work": 100.0}, {"work": 20.0}]).rigid()
    result = run("fifo", trace, "1x2", world=Settings(contention=1.0))
    assert result.finish_s.tolist() == pytest.approx([110, 30])
    apart = run("fifo", trace, "2x1", world=Settings(contention=1.0))
    assert apart.finish_s.tolist() == [100, 20]


def test_a_newcomer_slows_down_who_runs() -> None:
    trace = trace_of([{"work": 100.0}, {"work": 20.0, "submit_s": 40.0}]).rigid()
    result = run("fifo", trace, "1x2", world=Settings(contention=1.0))
    assert result.finish_s.tolist() == pytest.approx([110, 70])


def test_lost_work_is_counted_at_the_speed_at_which_it_was_done() -> None:
    """From 40 s on at 2/3 speed, a checkpoint at 30 s, stopped at 55 s: 10 and 10 steps are undone, 25 seconds."""
    jobs: list[dict[str, Any]] = [
        {"work": 300.0, "requested": 1},
        {"work": 100.0, "submit_s": 40.0, "requested": 1},
        {"work": 1.0, "submit_s": 55.0, "requested": 2},
    ]
    trace = msgspec.structs.replace(trace_of(jobs).rigid(), level=np.array([RESTART, UNSAID, UNSAID]))
    result = run("srtf", trace, "1x2", world=Settings(contention=1.0, checkpoint_s=30.0, stops_lose_work=True))
    assert result.lost_s[0] == pytest.approx(25)
    # 30 steps are saved at 55.5 s. With the other, which has 90 left, it then makes 90, and the rest alone.
    assert result.finish_s[1] == pytest.approx(55.5 + 90 * 1.5)
    assert result.finish_s[0] == pytest.approx(55.5 + 90 * 1.5 + 180)


def test_policies_see_the_jobs_own_curve_and_the_learner_what_happens() -> None:
    trace = trace_of([{"work": 500.0, "max_workers": 2}, {"work": 500.0, "max_workers": 2}])
    log: list[Any] = []
    simulate(trace, *cluster.parse("1x2"), watched("elastic-fifo", log), Settings(contention=1.0))
    assert all(view.rates is trace.rates for view, _ in log)
    log.clear()
    simulate(trace, *cluster.parse("1x2"), watched("elastic-fifo", log), Settings(contention=1.0, curves="learned"))
    told = [view.rates[0, view.curve[0], 1] for view, _ in log if len(view) == 2]
    assert told[-1] == pytest.approx(1 / 1.5, rel=0.01)


@settings(max_examples=25)
@given(trace=traces(), factor=st.sampled_from([0.1, 1.0]), placement=st.sampled_from(["", "pack", "spread"]))
def test_nobody_is_faster_than_alone_and_everybody_ends(trace: Trace, factor: float, placement: str) -> None:
    """Under fifo everybody who starts runs to its end, so its time lies between its own and the slowest possible."""
    result = run("fifo", trace, "2x8", world=Settings(contention=factor, placement=placement))
    took_s = result.finish_s - result.start_s
    assert (took_s >= trace.duration_s - 1e-6).all()
    assert (took_s <= trace.duration_s * (1 + factor) + 1e-6).all()
