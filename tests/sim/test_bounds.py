"""Lower bounds: right by hand, below every schedule there is, and the published figures."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import best, tiny
from strategies import trace_of, traces
from stretto.sim import bounds, readers
from stretto.sim.trace import Load, Trace

DATA = Path(__file__).parents[1] / "data"


def sized(submit: list[float], area: list[float], shortest: list[float]) -> bounds.Sizes:
    return bounds.Sizes(np.array(submit), np.array(area), np.array(shortest))


@pytest.mark.parametrize(
    ("file", "gpus", "mean_s", "makespan_s"),
    [
        ("60_job.csv", 8, 333.67, 3337.5),
        ("60_job.csv", 16, 178.42, 3271),
        ("ef_c06.csv", 128, 24433.74, 5166748),
    ],
)
def test_published_figures(file: str, gpus: int, mean_s: float, makespan_s: float) -> None:
    trace = readers.read(DATA / "tiresias" / file, "tiresias")
    of = bounds.sizes(trace)
    assert bounds.average_jct(of, gpus) == pytest.approx(mean_s, abs=0.005)
    assert bounds.makespan(of, gpus) == pytest.approx(makespan_s, abs=0.5)


def test_least_area_and_time() -> None:
    """On 1, 2, 3 workers it does 1, 3 and 3.5 steps/s: least GPU-seconds on 2, least time on 3."""
    trace = trace_of([{"work": 42.0, "rate": [0, 1, 3, 3.5], "min_workers": 1, "max_workers": 3, "width": 500}])
    of = bounds.sizes(trace)
    assert of.area_gpu_s.tolist() == pytest.approx([42 / 3 * 2 / 2])
    assert of.shortest_s.tolist() == pytest.approx([42 / 3.5])


def test_limits_of_the_job_count() -> None:
    """The same curve, but from 3 workers on."""
    trace = trace_of([{"work": 42.0, "rate": [0, 1, 3, 3.5], "min_workers": 3, "max_workers": 3}])
    of = bounds.sizes(trace)
    assert of.area_gpu_s.tolist() == pytest.approx([42 / 3.5 * 3])
    assert of.shortest_s.tolist() == pytest.approx([42 / 3.5])


def test_phases_add_up() -> None:
    trace = trace_of([{"work": 30.0, "max_workers": 2}, {"work": 1.0, "rate": [0, 2, 2], "max_workers": 2}])
    phases = ((np.array([10.0, 20.0]), np.array([0, 1])), (np.array([1.0]), np.array([1])))
    of = bounds.sizes(msgspec.structs.replace(trace, phases=phases))
    assert of.shortest_s.tolist() == pytest.approx([10 / 2 + 20 / 2, 0.5])
    assert of.area_gpu_s.tolist() == pytest.approx([10 + 10, 0.5])


def test_services_and_jobs_that_are_left_out_do_not_count() -> None:
    trace = trace_of([{"work": 10.0}, {"work": 20.0}, {"work": 40.0}])
    load = Load(np.array([0.0]), np.array([1]))
    of = bounds.sizes(msgspec.structs.replace(trace, services=(None, load, None)), np.array([True, True, False]))
    assert of.shortest_s.tolist() == [10.0]


def test_makespan_by_hand() -> None:
    """100 GPU-seconds from 0, 60 more from 50 on, on 2 GPUs: 50 + 60 / 2; unless one job is long by itself."""
    assert bounds.makespan(sized([0, 50], [100, 60], [1, 1]), 2) == 80
    assert bounds.makespan(sized([0, 50], [100, 60], [1, 45]), 2) == 95
    assert bounds.makespan(sized([0, 50], [180, 10], [1, 1]), 2) == 95
    assert bounds.makespan(sized([10, 60], [100, 60], [1, 1]), 2) == 80, "counted from the first submission"


def test_mean_by_hand() -> None:
    """Nobody is faster than alone; one machine does the smallest first; a job is not done before half of it is."""
    assert bounds.average_jct(sized([0, 0], [2, 2], [10, 20]), 2) == 15
    assert bounds.average_jct(sized([0, 0], [8, 4], [0, 0]), 2) == pytest.approx((2 + 6) / 2)
    # Alone 4 and 4. One machine: ends at 2 and 4. Busy in the middle at 1 and 3, and half of 4 after that.
    assert bounds.average_jct(sized([0, 0], [4, 4], [4, 4]), 2) == pytest.approx(4)
    assert bounds.average_jct(sized([0, 0, 0], [8, 8, 8], [4, 4, 4]), 2) == pytest.approx((2 + 6 + 10) / 3 + 2)


def test_a_newcomer_interrupts() -> None:
    """Sizes 10 at 0 and 2 at 4: done at 12 and 6, so (12 + 2) / 2."""
    assert bounds.average_jct(sized([0, 4], [10, 2], [0, 0]), 1) == pytest.approx(7)


def test_nothing_to_bound() -> None:
    nothing = sized([], [], [])
    assert math.isnan(bounds.average_jct(nothing, 4))
    assert math.isnan(bounds.makespan(nothing, 4))


def test_jobs_without_work() -> None:
    of = sized([0, 5], [0, 0], [0, 0])
    assert bounds.average_jct(of, 4) == 0
    assert bounds.makespan(of, 4) == 5


@settings(max_examples=60)
@given(trace=tiny(), gpus=st.integers(3, 4))
def test_below_the_best_of_all_schedules(trace: Trace, gpus: int) -> None:
    of = bounds.sizes(trace)
    mean_s, makespan_s = best(trace, gpus)
    assert bounds.average_jct(of, gpus) <= mean_s + 1e-9
    assert bounds.makespan(of, gpus) <= makespan_s + 1e-9


def test_reached_where_it_can_be() -> None:
    """One GPU, rigid jobs: smallest first is optimal, and the bound says so."""
    trace = trace_of([{"work": w, "submit_s": s} for w, s in ((5.0, 0.0), (2.0, 1.0), (4.0, 1.0))])
    mean_s, makespan_s = best(trace, 1)
    assert bounds.average_jct(bounds.sizes(trace), 1) == pytest.approx(mean_s)
    assert bounds.makespan(bounds.sizes(trace), 1) == pytest.approx(makespan_s)


@given(trace=traces(), gpus=st.integers(8, 16))
def test_more_gpus_never_raise_a_bound(trace: Trace, gpus: int) -> None:
    of = bounds.sizes(trace)
    assert bounds.average_jct(of, gpus + 1) <= bounds.average_jct(of, gpus) * (1 + 1e-9)
    assert bounds.makespan(of, gpus + 1) <= bounds.makespan(of, gpus) * (1 + 1e-9)
    assert bounds.average_jct(of, 1e12) == pytest.approx(of.shortest_s.mean())
