"""Whatever is decided and done: who would lose its work keeps the very devices it has."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import plugins
from stretto.backends.protocol import Node
from stretto.core import cycle
from stretto.jobs.model import Context, Job, Seat, Worker
from stretto.server import asked, deciding, reconcile, view
from stretto.server.book import Active
from stretto.server.estimates import Estimates
from stretto.server.reconcile import Devices, Shrink, Situation, Stop
from stretto.server.site import LocalSite, Question
from stretto.server.view import Cluster, Quota
from stretto.spec.model import JobFile

NOW_S = 1_000_000.0
POLICIES = ("stretto", "elastic-fifo", "afs-l", "srtf", "tiresias", "round-robin", "priority", "fit-first")


class Machine:
    """Devices that are given out one after the other, in milli."""

    def __init__(self, devices: list[int]) -> None:
        self.free = {(f"node-{i}", d): 1000 for i, count in enumerate(devices) for d in range(count)}

    def seat(self, milli: int, start: int) -> Seat | None:
        places = list(self.free)
        for place in places[start % len(places) :] + places[: start % len(places)]:
            if self.free[place] >= milli:
                self.free[place] -= milli
                return Seat(place[0], (place[1],))
        return None


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[int], list[Active], str, dict[str, float], dict[str, Quota]]:
    devices = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    machine = Machine(devices)
    jobs: list[Active] = []
    for number in range(1, draw(st.integers(2, 7)) + 1):
        gpu = draw(st.sampled_from([1, 0.5, 0.5, 0.25, 0.75]))
        level = draw(st.sampled_from(["rigid", "restart", "elastic"]))
        size, high = draw(st.integers(1, 2)), draw(st.integers(2, 4))
        sizes: dict[str, Any] = {"workers": size}
        if level != "rigid":
            sizes = {"elastic": {"min": 1, "max": high}, "level": level}
        file = JobFile.model_validate({"run": "x", "resources": {"gpu": gpu}, **sizes})
        runs, starts = draw(st.booleans()), draw(st.lists(st.integers(0, 11), min_size=size, max_size=size))
        seats = [machine.seat(round(gpu * 1000), start) for start in starts] if runs else []
        has = tuple(sorted(seat for seat in seats if seat is not None)) if None not in seats else ()
        since_s = NOW_S - draw(st.sampled_from([0.5, 100.0, 1000.0]))
        jobs.append(_active(number, file, has, since_s, keeps=draw(st.booleans())))
    nodes = [f"node-{i}" for i in range(len(devices))]
    drained = dict.fromkeys(draw(st.lists(st.sampled_from(nodes), max_size=1)), math.inf)
    quotas = draw(st.sampled_from([{}, {}, {"*": Quota(devices=1)}]))
    return devices, jobs, draw(st.sampled_from(POLICIES)), drained, quotas


def _active(number: int, file: JobFile, seats: tuple[Seat, ...], since_s: float, *, keeps: bool) -> Active:
    request = file.request()
    workers = tuple(
        Worker(name=f"w{i}", launch=f"{number}.w{i}", seat=seat, launched_s=since_s, pid=1)
        for i, seat in enumerate(seats)
    )
    job = Job(
        number=number, name=f"job-{number}", user="me", submitted_s=since_s - 1, changed_s=since_s, spec={},
        context=Context(cwd="/"), level=request.level, width_milli=request.width_milli,
        min_workers=request.min_workers, max_workers=request.max_workers, workers=workers,
        phase="running" if workers else "queued", keeps=keeps and request.level != "rigid",
    )  # fmt: skip
    active = Active(job, file, asked.request_of(job, file), seats)
    active.pool = 0 if seats else -1
    return active


@settings(deadline=None, max_examples=150)
@given(machines())
def test_who_is_pinned_keeps_its_devices_and_is_not_asked_to_leave(
    made: tuple[list[int], list[Active], str, dict[str, float], dict[str, Quota]],
) -> None:
    devices, jobs, policy, drained, quotas = made
    nodes = tuple(
        Node(name=f"node-{i}", pool="gpu", devices=count, cpu_milli=64_000, memory_mib=64_000, gpu_memory_mib=1000)
        for i, count in enumerate(devices)
    )
    holds, most = view.held(jobs, {}, quotas, NOW_S)
    assert not [number for number in holds if jobs[number - 1].target]
    shown = [active for active in jobs if active.number not in holds]
    snapshot = view.snapshot(shown, Cluster(nodes, drained), Estimates(), NOW_S, most)
    held = {active.number: view.kept(active, most.get(active.number)) for active in shown if active.target}
    pinned = {int(number) for number in snapshot.job[snapshot.pinned]}
    rules = cycle.Settings(placement="fewest-moves")
    decided = cycle.decide(snapshot, plugins.find(policy, {}), cycle.CycleState(), rules)
    found = deciding.verdicts(snapshot, decided, partial(deciding.on_devices, held), {}).of
    for number in pinned:
        assert sorted(found[number].seats) == list(jobs[number - 1].target), found[number].ground.text
    for active in shown:
        sizes = (0, *active.request.sizes())
        assert len(found[active.number].seats) in sizes
        new = [seat for seat in found[active.number].seats if seat not in active.target]
        assert not [seat for seat in new if seat.node in drained], "nobody new comes to a drained node"
    situations = [
        Situation(
            job=active.number, level=active.job.level, target=found[active.number].seats if active in shown else (),
            workers=active.job.workers, width_milli=active.request.width_milli,
            joined=frozenset(worker.name for worker in active.job.workers),
        )
        for active in jobs
    ]  # fmt: skip
    for action in reconcile.actions(situations, Devices):
        assert not (isinstance(action, (Stop, Shrink)) and action.job in pinned), action


def test_a_pinned_job_is_not_moved_to_make_a_device_whole() -> None:
    """Two halves of two devices are taken: there is room for a whole one only if somebody moves."""
    node = Node(name="node-0", pool="gpu", devices=2, cpu_milli=8000, memory_mib=8000, gpu_memory_mib=1000)
    half = JobFile.model_validate({"run": "x", "resources": {"gpu": 0.5}})
    whole = JobFile.model_validate({"run": "x"})
    jobs = [_active(i + 1, half, (Seat("node-0", (i,)),), NOW_S - 100, keeps=False) for i in range(2)]
    jobs.append(_active(3, whole, (), NOW_S, keeps=False))
    snapshot = view.snapshot(jobs, Cluster((node,)), Estimates(), NOW_S, {})
    held = {active.number: active.target for active in jobs if active.target}
    decided = cycle.decide(
        snapshot, plugins.find("fit-first", {}), cycle.CycleState(), cycle.Settings(placement="fewest-moves")
    )
    found = deciding.verdicts(snapshot, decided, partial(deciding.on_devices, held), {}).of
    assert {number: verdict.seats for number, verdict in found.items()} == {
        1: (Seat("node-0", (0,)),),
        2: (Seat("node-0", (1,)),),
        3: (),
    }
    assert found[3].ground.name == "fragmented"
    joined = [msgspec.structs.replace(active.job, keeps=True, level="elastic") for active in jobs[:2]]
    for active, job in zip(jobs, joined, strict=False):
        active.job, active.row = job, None
    snapshot = view.snapshot(jobs, Cluster((node,)), Estimates(), NOW_S, {})
    found = deciding.verdicts(snapshot, decided, partial(deciding.on_devices, held), {}).of
    assert len(found[3].seats) == 1, "those that keep their progress make room"


def test_nobody_is_stopped_for_a_whole_device_that_does_not_come_together() -> None:
    """A half of each device may be taken from its job, the other halves not: they would have to move."""
    node = Node(name="node-0", pool="gpu", devices=2, cpu_milli=8000, memory_mib=8000, gpu_memory_mib=1000)
    jobs = []
    for number in range(1, 5):
        asks = {"run": "x", "resources": {"gpu": 0.5}, "preemptible": number > 2}
        seat = Seat("node-0", (number % 2,))
        jobs.append(_active(number, JobFile.model_validate(asks), (seat,), NOW_S - 100, keeps=False))
    jobs.append(_active(5, JobFile.model_validate({"run": "x", "priority": 90}), (), NOW_S, keeps=False))
    backend: Any = SimpleNamespace(nodes=lambda: (node,))
    site = LocalSite(backend, Estimates(), Path("."), {})
    question = Question(
        jobs=jobs, most={}, policy=plugins.find("priority", {}), settings=cycle.Settings(placement="fewest-moves"),
        state=cycle.CycleState(), drained={}, now_s=NOW_S,
    )  # fmt: skip
    found = site.ask(question)().of
    assert {number: found[number].seats for number in found} == {a.number: a.target for a in jobs}
    jobs[0].request = msgspec.structs.replace(jobs[0].request, preemptible=True)
    jobs[0].row = None
    assert len(site.ask(question)().of[5].seats) == 1, "one device comes together"
