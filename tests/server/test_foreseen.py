"""What is foreseen to start now is what the loop starts: one source for decisions and forecasts."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_deciding import NOW_S, active, cores, window

from stretto import plugins
from stretto.backends.protocol import Node
from stretto.core import cycle
from stretto.core.cycle import CycleState
from stretto.core.estimate.curve import Window
from stretto.core.reservations import Wait
from stretto.core.snapshot import Snapshot
from stretto.jobs.model import Seat, Worker
from stretto.server import deciding, view
from stretto.server.book import Active
from stretto.server.estimates import Estimates
from stretto.server.view import Cluster
from stretto.sim.forecast import Forecast, forecast

POLICIES = [
    "stretto",
    "fifo",
    "fit-first",
    "elastic-fifo",
    "srtf",
    "afs-l",
    "tiresias",
    "round-robin",
    "priority",
    "gang",
]
GPUS = (Node(name="node-0", pool="h200", devices=2, cpu_milli=2000, memory_mib=16_000, gpu_memory_mib=80_000),)
SLOTS = (Node(name="node-0", pool="cpu", devices=16, cpu_milli=16_000, memory_mib=16_000),)


def foreseen(
    jobs: list[Active], nodes: tuple[Node, ...], estimates: Estimates | None = None, policy: str = "stretto"
) -> Forecast:
    seen = view.snapshot(jobs, Cluster(nodes), estimates or Estimates(), NOW_S, {})
    return forecast(seen, plugins.find(policy, {}), CycleState(), cycle.LIVE)


@pytest.mark.parametrize("policy", ["stretto", "fifo"])
def test_jobs_without_gpus_wait_for_cores(policy: str) -> None:
    jobs = [active(n, **cores(1), expect="100s") for n in range(1, 7)]
    told = foreseen(jobs, GPUS, policy=policy)
    assert (told.start_s == 0).tolist() == [True, True, False, False, False, False]
    assert told.end_s.max() >= 300


def test_an_unknown_job_starts_small_and_is_tried_at_larger_sizes() -> None:
    """As far as it is believed to gain."""
    job = active(1, elastic={"min": 1, "max": 16}, expect="1000s", workers=1)
    told = foreseen([job], SLOTS)
    fastest_s = 1000 / 16**0.7
    assert fastest_s < told.end_s[0] < 1.5 * fastest_s
    one_slot = (msgspec.structs.replace(SLOTS[0], devices=1),)
    assert foreseen([job], one_slot).end_s[0] >= 1000


def test_a_job_that_is_slower_on_more_workers_is_not_foreseen_there() -> None:
    estimates = Estimates()
    for _ in range(4):
        for workers, step_s in ((1, 1.0), (2, 0.6), (4, 0.9)):
            estimates.observe(1, "cpu", window(workers, step_s))
    job = active(1, elastic={"min": 1, "max": 16})
    job.progress.total = 1000
    told = foreseen([job], SLOTS, estimates)
    assert told.end_s[0] == pytest.approx(600, rel=0.05)


def test_a_job_that_tells_nothing_stays_as_it_is() -> None:
    job = active(1, tuple(Seat("node-0", (i,)) for i in range(2)), elastic={"min": 1, "max": 16}, workers=2)
    job.job = msgspec.structs.replace(job.job, ran_s=100.0, changed_s=NOW_S, starts=1)
    job.progress.total = 1000
    told = foreseen([job], SLOTS)
    assert told.end_s[0] == pytest.approx(1000 / 2**0.7, rel=0.02)


def test_a_reservation_holds_in_what_is_foreseen() -> None:
    """A wide job has waited behind one that may not be stopped: small ones that lose work do not start before it."""
    plain: dict[str, Any] = {"workers": 1}
    running, wide = run(active(1, workers=10, expect="1000s")), active(2, workers=16, expect="100s")
    small = [active(n, **plain, expect="5000s") for n in (3, 4)]
    seen = view.snapshot([running, wide, *small], Cluster(SLOTS), Estimates(), NOW_S, {})
    state = CycleState(blocked={2: Wait(since_s=NOW_S - 90.0)})
    policy = plugins.find("srtf", {})
    assert cycle.decide(seen, policy, state, cycle.LIVE).workers.tolist() == [10, 0, 0, 0]
    told = forecast(seen, policy, state, cycle.LIVE)
    assert told.start_s[1] < 1000
    assert (told.start_s[2:] >= told.end_s[1]).all()


def test_who_was_never_seen_to_keep_its_progress_is_held_back_in_what_is_foreseen() -> None:
    """As in the loop, until it has run: then it gives way to others as one that has joined does."""
    running, wide = run(active(1, workers=10, expect="1000s")), active(2, workers=16, expect="100s")
    small = [active(n, elastic={"min": 1, "max": 1}, expect=f"{n * 1000}s") for n in (3, 4)]
    seen = view.snapshot([running, wide, *small], Cluster(SLOTS), Estimates(), NOW_S, {})
    state = CycleState(blocked={2: Wait(since_s=NOW_S - 90.0)})
    policy = plugins.find("srtf", {})
    told_of: list[list[tuple[int, bool, bool]]] = []

    def noted(shown: Snapshot, *rest: Any) -> Any:
        assert shown.unproven is not None
        rows = zip(shown.job.tolist(), (shown.workers > 0).tolist(), shown.unproven.tolist(), strict=True)
        told_of.append([row for row in rows if row[0] in (3, 4)])
        return policy.function(shown, *rest)

    assert cycle.decide(seen, policy, state, cycle.LIVE).workers.tolist() == [10, 0, 0, 0]
    told = forecast(seen, msgspec.structs.replace(policy, function=noted), state, cycle.LIVE)
    assert told.start_s[1] < 1000
    assert (told.start_s[2:] >= told.end_s[1]).all()
    assert all(unproven != runs for rows in told_of for _, runs, unproven in rows)
    assert told_of[0] == [(3, False, True), (4, False, True)]
    assert any(runs for rows in told_of for _, runs, _ in rows)


def run(job: Active, since_s: float = 500.0) -> Active:
    """With the workers it asked for, since then."""
    seats = tuple(Seat("node-0", (i,)) for i in range(job.request.requested))
    workers = tuple(
        Worker(name=f"w{i}", launch=f"{job.number}.w{i}", seat=seat, launched_s=NOW_S - since_s, pid=1)
        for i, seat in enumerate(seats)
    )
    job.target, job.pool = seats, 0
    job.job = msgspec.structs.replace(
        job.job, workers=workers, phase="running", ran_s=since_s, changed_s=NOW_S, started_s=NOW_S - since_s, starts=1,
        device_s=since_s * len(workers),
    )  # fmt: skip
    return job


def test_of_a_job_that_never_starts_nothing_is_said_and_soon() -> None:
    """Its policy wants to be asked again and again."""
    asked = 0
    policy = plugins.find("stretto", {})

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return policy.function(*arguments)

    jobs = [active(1, workers=4, expect="10s"), active(2, workers=32, expect="10s")]
    seen = view.snapshot(jobs, Cluster(SLOTS), Estimates(), NOW_S, {})
    told = forecast(seen, msgspec.structs.replace(policy, function=counted), CycleState(), cycle.LIVE)
    assert np.isnan(told.start_s).tolist() == [False, True]
    assert np.isnan(told.end_s).tolist() == [False, True]
    assert asked < 500


@st.composite
def files(draw: st.DrawFn, gpus: bool) -> dict[str, Any]:
    low = draw(st.integers(1, 3))
    high = draw(st.integers(low, 8))
    size: dict[str, Any] = draw(
        st.sampled_from([
            {"workers": low},
            {"elastic": {"min": low, "max": high}},
            {"elastic": {"min": low, "max": high, "explore": False}},
            {"elastic": {"min": low, "max": high}, "level": "restart"},
        ])
    )  # fmt: skip
    wide = [{}, {"gpu": 0, "cpu": 1}, {"gpu": 0, "cpu": 2, "memory": "1Gi"}]
    some = [{}, {"gpu": 0.5, "gpu_memory": "8Gi"}, {"gpu": 2}] if gpus else [{}]
    return {
        **size,
        "name": draw(st.sampled_from(["", "digits", "letters"])) or None,
        "resources": draw(st.sampled_from(wide + some)),
        "priority": draw(st.sampled_from([50, 50, 50, 70])),
        **draw(st.sampled_from([{}, {"expect": "60s"}, {"expect": "5000s"}])),
    }


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Active], Cluster, Estimates]:
    gpus = draw(st.booleans())
    count = draw(st.integers(1, 2))
    nodes = tuple(
        Node(name=f"node-{i}", pool="h200", devices=draw(st.integers(1, 4)), cpu_milli=draw(st.integers(1, 8)) * 1000,
             memory_mib=16_000, gpu_memory_mib=80_000)
        if gpus else
        Node(name=f"node-{i}", pool="cpu", devices=draw(st.integers(1, 8)), cpu_milli=8000, memory_mib=16_000)
        for i in range(count)
    )  # fmt: skip
    drawn = draw(st.lists(files(gpus), min_size=1, max_size=7))
    jobs = []
    for number, fields in enumerate(drawn, 3):
        name = fields.pop("name")
        fields |= {"name": f"{name}-{number}"} if name else {}
        jobs.append(active(number, **fields))
    estimates = Estimates()
    for job in jobs:
        if job.job.level == "elastic" and draw(st.booleans()):
            job.progress.total, job.progress.steps = 1000, draw(st.integers(0, 900))
    return jobs, Cluster(nodes), estimates


@settings(max_examples=150)
@given(scene=scenes(), name=st.sampled_from(POLICIES), data=st.data())
def test_what_is_foreseen_to_start_now_is_what_the_loop_starts(
    scene: tuple[list[Active], Cluster, Estimates], name: str, data: st.DataObject
) -> None:
    jobs, where, estimates = scene
    policy, state, now_s = plugins.find(name, {}), CycleState(), NOW_S
    for _ in range(4):
        seen = view.snapshot(jobs, where, estimates, now_s, {})
        told = forecast(seen, policy, state, cycle.LIVE)
        decided = cycle.decide(seen, policy, state, cycle.LIVE)
        held = {job.number: job.target for job in jobs if job.target}
        verdicts = deciding.verdicts(seen, decided, partial(deciding.on_devices, held), {})
        runs = [bool(job.target or verdicts.of[job.number].seats) for job in jobs]
        assert (told.start_s == 0).tolist() == runs
        state, now_s = verdicts.state, now_s + data.draw(st.sampled_from([1.0, 40.0, 100.0]))
        for job in jobs:
            carry_out(job, verdicts.of[job.number], now_s)
            if job.job.keeps and data.draw(st.booleans()):
                step_s = data.draw(st.sampled_from([0.1, 0.2, 0.5]))
                timed = Window(len(job.target), 8, step_s, 0.01, now_s - 1.0, now_s)
                estimates.observe(job.number, where.pools[job.pool], timed)
        late = [job.number for job in jobs if not job.target and data.draw(st.booleans())]
        state = msgspec.structs.replace(state, blocked=state.blocked | {n: Wait(now_s - 100.0) for n in late})
        gone = data.draw(st.sampled_from([*jobs, None])) if len(jobs) > 1 else None
        jobs = [job for job in jobs if job is not gone]


def carry_out(job: Active, verdict: deciding.Verdict, now_s: float) -> None:
    """Elastic jobs have joined at once."""
    before, changed = job.job, len(job.target) != len(verdict.seats)
    job.target, job.pool = verdict.seats, verdict.pool
    if not changed:
        return
    workers = tuple(
        Worker(name=f"w{i}", launch=f"{job.number}.w{i}", seat=seat, launched_s=now_s - 1.0, pid=1)
        for i, seat in enumerate(job.target)
    )
    job.job = msgspec.structs.replace(
        before, workers=workers, phase="running" if workers else "queued", changed_s=now_s - 0.5,
        starts=before.starts + 1, started_s=before.started_s or now_s - 1.0,
        keeps=before.keeps or (before.level == "elastic" and bool(workers)),
    )  # fmt: skip


def test_services_get_what_their_load_asks_for_and_nobody_says_when_they_end() -> None:
    serving = active(1, service={"port": 8000, "replicas": {"min": 1, "max": 8}}, kind="service")
    serving.wanted = 4
    jobs = [serving, active(2, workers=12, expect="100s"), active(3, workers=1, expect="100s")]
    told = foreseen(jobs, SLOTS, policy="fifo")
    assert told.start_s.tolist()[:2] == [0.0, 0.0]
    assert told.start_s[2] > 100
    assert np.isnan(told.end_s).tolist() == [True, False, False]


def test_of_nobody_nothing_is_said() -> None:
    assert len(foreseen([], SLOTS).start_s) == 0
