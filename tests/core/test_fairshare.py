"""The fair world that our policy carries along: by hand, and against the one that fairness is measured with."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import job, trace_of, traces, view_of
from stretto.core import fairshare
from stretto.core.estimate import course as courses
from stretto.core.fairshare import FairWorld
from stretto.core.services import only
from stretto.core.snapshot import GPU, FloatArray, Snapshot
from stretto.sim.fair import fair_finish
from stretto.sim.trace import Trace


def step(world: FairWorld | None, view: Snapshot, done: list[float], size: list[float]) -> FairWorld:
    view = msgspec.structs.replace(view, done=np.array(done, np.float64))
    start = fairshare.empty(view) if world is None else world
    return fairshare.advance(start, view, courses.watched(start.course, view), np.array(size, np.float64))


def at(view: Snapshot, now_s: float) -> Snapshot:
    return msgspec.structs.replace(view, now_s=now_s)


def test_equal_shares_and_speeds() -> None:
    """4 GPUs: one job is capped at 1, two others share the other 3; a curve of 1, 1.5 gives 1.25 in the middle."""
    view = view_of(4, [job(max_workers=1), job(max_workers=4, rate=[0, 1, 1.5, 2, 2]), job(max_workers=8)])
    world = step(None, view, [0, 0, 0], [9, 9, 9])
    assert world.share.tolist() == pytest.approx([1, 1.5, 1.5])
    assert world.speed.tolist() == pytest.approx([1, 1.25, 1.5])


def test_speed_is_linear_below_the_minimum() -> None:
    """Two jobs that need 4 of 4 GPUs hold 2 each: half the speed of their minimum."""
    view = view_of(4, [job(min_workers=4, max_workers=4, rate=[0, 0, 0, 0, 7.0])] * 2)
    world = step(None, view, [0, 0], [100, 100])
    assert world.share.tolist() == [2, 2]
    assert world.speed.tolist() == [3.5, 3.5]


def test_shares_are_of_gpus() -> None:
    view = view_of(2, [job(max_workers=9, width=500), job(max_workers=9)])
    assert step(None, view, [0, 0], [9, 9]).share.tolist() == [2, 1]


def test_progress_and_end() -> None:
    """Both hold one GPU; the first needs 10 s of it: it ended at 10, seen at 12. From then on the other has both."""
    view = view_of(2, [job(max_workers=2), job(max_workers=2)])
    world = step(None, view, [0, 0], [10, 100])
    world = step(world, at(view, 12.0), [0, 0], [10, 100])
    assert world.ended_s.tolist() == [10, math.inf]
    assert world.progress.tolist() == [10, 12]
    assert world.share.tolist() == [0, 2]
    world = step(world, at(view, 20.0), [0, 0], [10, 100])
    assert world.progress.tolist() == [10, 12 + 16]


def test_who_left_early_lives_on() -> None:
    """The first job ends in reality at once; here it goes on until its 10 s are over, and only then shares change."""
    view = view_of(2, [job(max_workers=2), job(max_workers=2)])
    rest = only(view, np.array([False, True]))
    world = step(None, view, [0, 0], [10, 100])
    world = step(world, at(rest, 2.0), [0], [100])
    assert world.job.tolist() == [0, 1]
    assert world.here.tolist() == [False, True]
    assert world.share.tolist() == [1, 1]
    world = step(world, at(rest, 11.0), [0], [100])
    assert world.job.tolist() == [1]
    assert world.share.tolist() == [2]


def test_who_ended_here_stays_until_it_leaves() -> None:
    view = view_of(2, [job(max_workers=2)])
    world = step(step(None, view, [0], [4]), at(view, 50.0), [0], [4])
    assert world.ended_s.tolist() == [2]
    nobody = only(at(view, 60.0), np.array([False]))
    assert step(world, nobody, [], []).job.tolist() == []


def test_a_job_of_unknown_length_is_as_long_as_it_was() -> None:
    """It ran at 2 steps/s from 0 on and was gone when we looked at 3: it needed 6."""
    view = view_of(4, [job(max_workers=2), job(max_workers=2)])
    world = fairshare.paced(step(None, view, [0, 0], [math.nan, 100]), view, np.array([2.0, 1.0]))
    world = step(world, at(only(view, np.array([False, True])), 3.0), [3], [100])
    assert world.job.tolist() == [1], "2 GPUs in both worlds: it ended here, too"
    view = view_of(2, [job(max_workers=2), job(max_workers=2)])
    world = fairshare.paced(step(None, view, [0, 0], [math.nan, 100]), view, np.array([2.0, 1.0]))
    world = step(world, at(only(view, np.array([False, True])), 3.0), [3], [100])
    assert world.size.tolist() == [6, 100]
    assert world.progress.tolist() == [3, 3]


def test_newcomers_join_in_order_of_number() -> None:
    view = view_of(3, [job(max_workers=3)] * 3)
    world = step(None, only(view, np.array([True, False, True])), [0, 0], [9, 9])
    world = step(world, at(view, 1.0), [0, 0, 0], [9, 9, 9])
    assert world.job.tolist() == [0, 1, 2]
    assert fairshare.positions(world, view).tolist() == [0, 1, 2]


def test_only_newcomers_are_credited_with_the_time_since_their_submission() -> None:
    """The second job is first seen 3 s late. The first got nothing in the outage before, here as there."""
    view = view_of(2, [job(max_workers=1), job(max_workers=1, submit_s=97.0)])
    outage = msgspec.structs.replace(only(view, np.array([True, False])), capacity=np.array([0]))
    world = step(step(None, outage, [0], [50]), at(view, 100.0), [0, 0], [50, 50])
    assert world.progress.tolist() == [0, 3]


def test_a_new_table_of_throughputs() -> None:
    """Curves are found again for who is here. Who has left goes on in proportion to its share."""
    view = view_of(4, [job(max_workers=4, rate=[0, 2, 3, 3.5, 4]), job(max_workers=4, rate=[0, 1, 1, 1, 1])])
    world = step(None, view, [0, 0], [100, 100])
    assert world.speed.tolist() == [3, 1]
    rest = only(view, np.array([False, True]))
    rest = msgspec.structs.replace(rest, rates=np.array([[[0.0, 1, 2, 3, 4]]]), curve=np.array([0]), now_s=1.0)
    world = step(world, rest, [0], [100])
    assert world.speed.tolist() == [3, 2]
    world = step(world, msgspec.structs.replace(rest, now_s=2.0, capacity=np.array([2 * GPU])), [0], [100])
    assert world.speed.tolist() == [1.5, 1]


def test_a_phase_changes_the_curve() -> None:
    view = view_of(2, [job(max_workers=2, rate=[0, 1, 2]), job(max_workers=1, rate=[0, 1, 1], submit_s=0.0)])
    alone = only(view, np.array([True, False]))
    world = step(None, alone, [0], [100])
    assert world.speed.tolist() == [2]
    world = step(world, msgspec.structs.replace(alone, curve=np.array([1]), now_s=1.0), [0], [100])
    assert world.speed.tolist() == [1]


def test_no_gpus_no_progress() -> None:
    view = view_of([], [job(max_workers=2)] * 2)
    world = step(step(None, view, [0, 0], [5, 5]), at(view, 9.0), [0, 0], [5, 5])
    assert world.progress.tolist() == [0, 0]
    assert np.isinf(world.ended_s).all()


@given(caps=st.lists(st.integers(1, 20), min_size=1, max_size=8), gpus=st.integers(0, 60))
def test_the_level_fills_the_cluster(caps: list[int], gpus: int) -> None:
    """All GPUs are shared out, or everybody has its cap; nobody below its cap has less than another."""
    view = view_of(gpus, [job(max_workers=cap) for cap in caps])
    share = step(None, view, [0] * len(caps), [9] * len(caps)).share
    assert share.sum() == pytest.approx(min(gpus, sum(caps)))
    assert (share <= np.array(caps) + 1e-9).all()
    assert share[share < np.array(caps) - 1e-9] == pytest.approx(share.max(initial=0.0))


def ended(trace: Trace, gpus: int, step_s: float) -> FloatArray:
    """When each job ends in the carried world, looked at every so often, with the jobs idle in reality."""
    columns: dict[str, Any] = {
        name: getattr(trace, name) for name in ("min_workers", "max_workers", "width", "submit_s", "requested")
    }
    every = [job(**{name: column[j] for name, column in columns.items()}) for j in range(len(trace))]
    view = msgspec.structs.replace(view_of(gpus, every), rates=trace.rates, curve=trace.curve)
    world, now_s = fairshare.empty(view), 0.0
    while np.isinf(world.ended_s).any() or len(world.job) < len(trace):
        came = trace.submit_s <= now_s
        world = fairshare.advance(world, at(only(view, came), now_s), world.course, trace.work[came])
        now_s += step_s
    return world.ended_s


@settings(max_examples=15)
@given(trace=traces(max_jobs=5), gpus=st.integers(8, 12))
def test_the_same_world_as_fairness_is_measured_with(trace: Trace, gpus: int) -> None:
    """Looked at often, it ends every job when `sim.fair` does; each look is late by up to its distance."""
    step_s = 0.5
    assert ended(trace, gpus, step_s) == pytest.approx(fair_finish(trace, gpus * GPU), abs=step_s * (len(trace) + 1))


def test_looked_at_once_it_is_close() -> None:
    """Ends between two looks are told to the moment as long as shares do not change in between."""
    trace = trace_of([{"work": 10.0, "max_workers": 2}, {"work": 30.0, "max_workers": 2}])
    assert ended(trace, 4, 100.0).tolist() == fair_finish(trace, 4 * GPU).tolist() == [5, 15]


def test_who_runs_ahead_here_is_on_the_curve_that_comes_there() -> None:
    """In the second half a job has four times the speed. One such job was seen to change; another, idle in reality,
    holds the cluster alone here: half of it takes 50 s, the rest 12.5 s."""
    idle = msgspec.structs.replace(
        view_of(1, [job(max_workers=1, rate=[0, 1]), job(max_workers=1, rate=[0, 4])]), remaining=np.array([100.0, 1.0])
    )
    alone = only(idle, np.array([True, False]))
    course = msgspec.structs.replace(courses.empty(idle), follows=np.array([1, -1]), begins=np.array([1.0, 0.5]))
    world = fairshare.advance(fairshare.empty(alone), alone, course, np.array([100.0]))
    assert fairshare.age_at(world, alone, np.array([100.0])).tolist() == [62.5]
    later = at(alone, 55.0)
    world = fairshare.advance(world, later, course, np.array([100.0]))
    assert world.progress.tolist() == [70]
    assert world.speed.tolist() == [4]
    world = fairshare.advance(world, at(alone, 90.0), course, np.array([100.0]))
    assert world.ended_s.tolist() == pytest.approx([62.5])


@settings(max_examples=50)
@given(
    gpus=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    spaces=st.lists(st.floats(1.0, 5000.0), min_size=12, max_size=12),
    part=st.floats(0.01, 1.2),
)
def test_the_age_at_which_it_had_so_much(gpus: list[int], spaces: list[float], part: float) -> None:
    """Against the whole history, for a job of unknown length while capacity comes and goes: as exact as the table."""
    view = view_of(8, [job(max_workers=8)])
    world, now_s, times, done = fairshare.empty(view), 0.0, [0.0], [0.0]
    for count, space in zip(gpus, spaces, strict=False):
        there = msgspec.structs.replace(at(view, now_s), capacity=np.array([count * GPU]))
        world = step(world, there, [0], [math.nan])
        now_s += space
        times.append(now_s)
        done.append(done[-1] + count * space)
    last = msgspec.structs.replace(at(view, now_s), capacity=np.array([gpus[-1] * GPU]))
    world = step(world, last, [0], [math.nan])
    assert world.progress.tolist() == pytest.approx(done[-1:])
    wanted = part * done[-1]
    age_s = fairshare.age_at(world, last, np.array([wanted]))[0]
    right_s = np.interp(wanted, done, times) if part <= 1 else now_s + (wanted - done[-1]) / gpus[-1]
    assert right_s / 1.16 - 20 <= age_s <= right_s * 1.16 + 20
