"""The incremental runner leaves behind what the general engine does, and what a walk through every second does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.policy import load
from stretto.errors import PolicyError
from stretto.sim import cluster, engine, listrun
from stretto.sim.general import Engine
from stretto.sim.trace import Load, Trace
from stretto.sim.world import Failure, Result, Settings

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
def traces(draw: st.DrawFn, units: tuple[float, ...] = (1.0, 0.5, 0.1), widths: tuple[int, ...] = (1000, 500)) -> Trace:
    """Few jobs with many ties: equal submissions, sizes, lengths (also none), priorities and deadlines."""
    n = draw(st.integers(1, 14))
    unit = draw(st.sampled_from(units))

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
        width_milli=column(st.sampled_from(widths)),
    )


@st.composite
def priced(draw: st.DrawFn, trace: Trace) -> Trace:
    """The same jobs with costs and levels of their own, at which nobody loses any work."""
    if draw(st.booleans()):
        return trace
    starts = draw(st.lists(st.sampled_from([0.0, 0.5, 3.0, math.nan]), min_size=len(trace), max_size=len(trace)))
    levels = draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=len(trace), max_size=len(trace)))
    return msgspec.structs.replace(
        trace, start_s=np.array(starts), resize_s=np.full(len(trace), 9.0), level=np.array(levels, np.int64)
    )


def both(trace: Trace, gpus: int, name: str, options: dict[str, Any], world: Settings) -> tuple[Result, Result]:
    policy = load(name, options)
    pools, nodes = cluster.uniform(1, gpus)
    assert listrun.applies(trace, pools, policy, world)
    general = Engine(trace, pools, nodes, policy, world).run()
    return listrun.run(trace, pools, nodes, policy, world, None), general


def assert_same(ours: Result, general: Result) -> None:
    for field in ("start_s", "finish_s", "gpu_s", "paused_s", "lost_s", "lost_to_failures_s"):
        np.testing.assert_array_equal(getattr(ours, field), getattr(general, field), field)
    for field in ("preemptions", "resizes", "rejected", "is_service", "events", "decisions", "changes"):
        np.testing.assert_equal(getattr(ours, field), getattr(general, field), field)


@pytest.mark.parametrize(("name", "options"), POLICIES, ids=NAMES)
@given(trace=traces(), gpus=st.integers(4, 9), start_s=st.sampled_from([0.0, 0.0, 1.5]), data=st.data())
@settings(max_examples=40)
def test_equals_the_general_engine(
    name: str, options: dict[str, Any], trace: Trace, gpus: int, start_s: float, data: st.DataObject
) -> None:
    """Also where starts cost each job something else, and where a level is said that loses nothing."""
    if "promote" in options:
        start_s = 0.0  # With limits this tight a costly start would be followed by a stop, for ever.
    else:
        trace = data.draw(priced(trace))
    assert_same(*both(trace, gpus, name, options, Settings(start_s=start_s, record=True)))


@given(trace=traces(units=(1.0,), widths=(1000,)), gpus=st.integers(4, 9), factor=st.sampled_from([0.5, 2.0, 3.0]))
@settings(max_examples=40)
def test_srjf_runs_elastic_jobs_at_their_minimum(trace: Trace, gpus: int, factor: float) -> None:
    """Jobs that run at another speed than 1 step/s, on fewer workers than they asked for."""
    rates = np.repeat(np.arange(5.0)[None, None] * factor, len(trace), axis=1)
    elastic = msgspec.structs.replace(
        trace, min_workers=np.ones(len(trace), np.int64), rates=rates, curve=np.arange(len(trace))
    )
    ours, general = both(elastic, gpus, "srjf", {}, Settings(record=True))
    assert_same(ours, general)
    np.testing.assert_allclose(ours.gpu_s, elastic.work / factor)


# One second after the other, with the policies written out.


class Job(msgspec.Struct):
    number: int
    submit: int
    need: int
    left: int
    priority: int
    deadline: float
    ran: int = 0
    waited: int = 0
    level: int = 0
    start: int | None = None
    finish: int | None = None
    stops: int = 0
    runs: bool = False


def step_through(
    trace: Trace,
    gpus: int,
    order: Callable[[list[Job]], list[Job]],
    *,
    stop: bool = False,
    limits: tuple[int, ...] = (),
    promote: int = 0,
) -> list[Job]:
    """Nothing clever: every second, see what happened, and if anything did, walk the jobs in order.

    `order` sorts the list as it stands; the list is the order of the last walk with newcomers behind.
    """
    columns = (trace.submit_s, trace.requested, trace.duration_s, trace.priority, trace.deadline_s)
    jobs = [
        Job(i, int(s), int(g), int(d), int(p), due) for i, (s, g, d, p, due) in enumerate(zip(*columns, strict=True))
    ]
    listed: list[Job] = []
    now = 0
    while any(job.finish is None for job in jobs):
        something = True
        while something:
            something = False
            for job in jobs:
                if job.submit <= now and job not in listed and job.finish is None:
                    listed.append(job)
                    something = True
                elif job.runs and job.left == 0:
                    job.runs, job.finish = False, now
                    listed.remove(job)
                    something = True
            for job in sorted(listed, key=lambda job: job.number):
                level = job.level
                while job.runs and level < len(limits) and job.ran * job.need >= limits[level]:
                    level += 1
                if promote and not job.runs and level and job.ran and job.waited >= promote * job.ran:
                    level = job.ran = job.waited = 0
                if level != job.level:
                    job.level = level
                    listed.remove(job)
                    listed.append(job)
                    something = True
            if something:
                listed = order(listed)
                walk(listed, gpus, now, stop)
                if limits:
                    listed = [job for job in listed if job.runs] + [job for job in listed if not job.runs]
        for job in listed:
            if job.runs:
                job.left -= 1
                job.ran += 1
            elif job.ran:
                job.waited += 1
        now += 1
    return jobs


def walk(listed: list[Job], gpus: int, now: int, stop: bool) -> None:
    free, blocked = gpus, False
    for job in listed:
        fits = job.need <= free and not blocked
        blocked = blocked or (stop and not fits)
        free -= job.need if fits else 0
        job.stops += job.runs and not fits
        job.start = now if fits and job.start is None else job.start
        job.runs = fits


def by(*fields: str) -> Callable[[list[Job]], list[Job]]:
    return lambda listed: sorted(listed, key=lambda job: [getattr(job, field) for field in (*fields, "number")])


WRITTEN_OUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fifo": ({}, {"order": lambda jobs: sorted(by("number")(jobs), key=lambda job: not job.runs), "stop": True}),
    "fit-first": ({}, {"order": lambda jobs: sorted(by("number")(jobs), key=lambda job: not job.runs)}),
    "sjf": ({}, {"order": by("need")}),
    "srtf": ({}, {"order": by("left")}),
    "srsf": ({}, {"order": lambda jobs: sorted(by("number")(jobs), key=lambda job: job.left * job.need)}),
    "edf": ({}, {"order": by("deadline")}),
    "priority": (
        {},
        {"order": lambda jobs: sorted(by("number")(jobs), key=lambda job: (-job.priority, not job.runs))},
    ),
    # Limits that every width reaches after whole seconds.
    "tiresias": (
        {"queues": (12.0, 24.0)},
        {"order": lambda jobs: sorted(jobs, key=lambda job: job.level), "limits": (12, 24)},
    ),
    "tiresias promoting": (
        {"queues": (12.0,), "promote": 2.0},
        {"order": lambda jobs: sorted(jobs, key=lambda job: job.level), "limits": (12,), "promote": 2},
    ),
    "srtf original": ({"original": True}, {"order": lambda jobs: sorted(jobs, key=lambda job: job.left)}),
}


@pytest.mark.parametrize("case", WRITTEN_OUT)
@given(trace=traces(units=(1.0,), widths=(1000,)), gpus=st.integers(4, 9))
@settings(max_examples=30)
def test_equals_stepping_through_every_second(case: str, trace: Trace, gpus: int) -> None:
    options, told = WRITTEN_OUT[case]
    pools, nodes = cluster.uniform(1, gpus)
    found = engine.simulate(trace, pools, nodes, load(case.split()[0], options))
    jobs = step_through(trace, gpus, **told)
    assert found.finish_s.tolist() == [job.finish for job in jobs]
    assert found.start_s.tolist() == [job.start for job in jobs]
    assert found.preemptions.tolist() == [job.stops for job in jobs]


# Where it must not be used, and what it says when nothing can happen.


@pytest.mark.parametrize(
    "world",
    [
        Settings(placement="pack"),
        Settings(failures=(Failure(1.0, 0),)),
        Settings(lengths="unknown"),
        Settings(estimate_sd=0.5),
        Settings(slot_s=60.0),
        Settings(gap_s=60.0),
        Settings(level="rigid"),
        Settings(level="restart", checkpoint_s=60.0),
        Settings(preemptible=False),
        Settings(contention=0.5),
    ],
)
def test_other_worlds_are_left_to_the_general_engine(world: Settings) -> None:
    trace = Trace.build("t", ["a"], [0.0], [1], [1.0])
    assert listrun.applies(trace, ("gpu",), load("srtf"), Settings())
    assert not listrun.applies(trace, ("gpu",), load("srtf"), world)


def test_what_is_not_a_plain_list_is_left_to_the_general_engine() -> None:
    trace = Trace.build("t", ["a"], [0.0], [1], [1.0])
    loses = msgspec.structs.replace(trace, level=np.array([2]))
    assert not listrun.applies(loses, ("gpu",), load("fifo"), Settings())
    serves = msgspec.structs.replace(trace, services=(Load(np.zeros(1), np.ones(1, np.int64)),))
    assert not listrun.applies(trace, ("gpu",), load("edf", {"admission": True}), Settings())
    assert not listrun.applies(trace, ("big", "small"), load("fifo"), Settings())
    assert not listrun.applies(serves, ("gpu",), load("fifo"), Settings())


def test_a_livelock_is_an_error() -> None:
    """Two jobs that take turns more often than a start takes never get anywhere."""
    trace = Trace.build("t", ["a", "b"], [0.0, 0.0], [2, 2], [10.0, 10.0])
    policy = load("tiresias", {"queues": (0.1,), "promote": 0.1})
    pools, nodes = cluster.uniform(1, 2)
    with pytest.raises(PolicyError, match="for ever"):
        engine.simulate(trace, pools, nodes, policy, Settings(start_s=5.0))


def test_progress_is_told() -> None:
    trace = Trace.build("t", [str(i) for i in range(600)], [float(i) for i in range(600)], [1] * 600, [0.5] * 600)
    pools, nodes = cluster.uniform(1, 1)
    calls: list[tuple[int, int]] = []
    engine.simulate(trace, pools, nodes, load("fifo"), progress=lambda ended, jobs: calls.append((ended, jobs)))
    assert calls == [(256, 600), (512, 600)]
