"""What becomes of the steps that workers timed: which windows count, and what is said of a job's speed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import played_machine
import pytest
from machine import Machine, machine_of, play
from played_worker import Line

from stretto.api import answers
from stretto.backends.protocol import Node
from stretto.core.estimate import curve as curves
from stretto.jobs.model import Context, Job, Seat, Worker
from stretto.runtime import messages as m
from stretto.server import asked, view
from stretto.server.book import Active
from stretto.server.drivers.base import Surroundings
from stretto.server.drivers.elastic import ElasticDriver
from stretto.server.estimates import Estimates
from stretto.server.view import Cluster
from stretto.spec.model import JobFile

NODE = Node(name="node-0", pool="cpu", devices=4, cpu_milli=4000, memory_mib=1000)

# With workers that are played.


class Played:
    """A driver, its surroundings, and a clock that stands still unless it is moved."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.now_s, self.new_sizes, self.disturbed_s = 1000.0, 0, 0.0
        file = JobFile.model_validate({"run": "true", "name": "digits", "elastic": {"min": 1, "max": 4}})
        job = Job(
            number=1, name="digits", user="me", submitted_s=0.0, changed_s=0.0, spec={}, context=Context(cwd="/"),
            level="elastic", width_milli=1000, min_workers=1, max_workers=4, secret="secret",
            workers=tuple(self.worker(f"w{i}") for i in range(workers)),
        )  # fmt: skip
        seats = tuple(worker.seat for worker in job.workers)
        self.active = Active(job, file, asked.request_of(job, file), seats, pool=0)
        self.estimates = Estimates()
        around = Surroundings(
            folder=folder / "jobs", url=lambda: "ws://nowhere", changed=self._changed, progressed=lambda number: None,
            estimates=self.estimates, pools=lambda: ("cpu",), clock=lambda: self.now_s,
            terminate=lambda number, name: None, environment={},
            disturbed=lambda number, since_s, until_s: since_s <= self.disturbed_s <= until_s,
        )  # fmt: skip
        self.driver = ElasticDriver(self.active, around)
        self.lines: list[Line] = []

    @staticmethod
    def worker(name: str) -> Worker:
        return Worker(name=name, launch=f"1.{name}.x", seat=Seat("node-0", (0,)), launched_s=0.0)

    def _changed(self, number: int) -> None:
        self.new_sizes += 1

    async def join(self, name: str) -> Line:
        line = Line(self.driver, name)
        self.lines.append(line)
        await line.hear(m.Welcome)
        line.say(m.Ready())
        return line

    def launch(self, name: str) -> None:
        """As the loop does: the driver is told before the launch is written down."""
        self.driver.prepare(len(self.active.job.workers) + 1)
        workers = (*self.active.job.workers, self.worker(name))
        self.active.job = msgspec.structs.replace(self.active.job, workers=workers)

    @property
    def rate(self) -> float:
        return self.active.progress.rate

    @property
    def steps(self) -> dict[int, float]:
        """Timed, by size."""
        curve = self.estimates.measured(1).get("cpu", curves.Curve())
        return {size.workers: size.steps for size in curves.measured(curve)}


@contextlib.asynccontextmanager
async def played(folder: Path, workers: int = 1) -> AsyncIterator[Played]:
    found = Played(folder, workers)
    try:
        yield found
    finally:
        for line in found.lines:
            line.task.cancel()
        await asyncio.gather(*(line.task for line in found.lines), return_exceptions=True)
        await found.driver.close()


def window(number: int, generation: int, members: int = 1, median_s: float = 0.1, **fields: Any) -> m.Window:
    given = {"count": 8, "spread_s": 0.01, "lasted_s": 8 * median_s} | fields
    return m.Window(number=number, generation=generation, members=members, median_s=median_s, **given)


def test_each_window_counts_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            told = [window(i, generation) for i in range(1, 4)]
            await line.beat(generation, told[0])
            assert p.steps == {1: 8}
            assert p.rate == pytest.approx(10.0)
            await line.beat(generation, *told)
            await line.beat(generation, *told)
            assert p.steps == {1: 24}

    play(story())


def test_the_newest_window_is_the_speed_and_keeps_when_it_was(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            old, new = window(1, generation, age_s=3.0), window(2, generation, median_s=0.05, age_s=0.5, lasted_s=1.5)
            await line.beat(generation, old, new)
            assert p.rate == pytest.approx(20.0)
            kept = p.active.progress.window
            assert kept is not None
            assert (kept.workers, kept.count) == (1, 8)
            assert (kept.began_s, kept.ended_s) == (p.now_s - 2.0, p.now_s - 0.5)

    play(story())


def test_what_was_timed_while_a_neighbour_came_does_not_count(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            p.disturbed_s = p.now_s - 0.5
            await line.beat(generation, window(1, generation, age_s=3.0), window(2, generation, median_s=0.2))
            assert p.steps == {1: 8}
            assert p.rate == pytest.approx(10.0)

    play(story())


def test_only_the_leader_of_the_generation_is_believed(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2) as p:
            p.driver.prepare(2)
            first = await p.join("w0")
            generation = await first.form()
            second = await p.join("w1")
            p.driver.prepare(2)
            await first.form()
            generation = await second.form()
            await second.beat(generation, window(1, generation, 2))
            await first.beat(generation, window(1, generation, 1), window(2, generation - 1, 2))
            assert p.steps == {}, "not the leader, not its size, not its generation"
            await first.beat(generation, window(3, generation, 2))
            assert p.steps == {2: 8}

    play(story())


@pytest.mark.parametrize(
    "wrong",
    [
        {"median_s": 0.0}, {"median_s": -1.0}, {"median_s": math.nan}, {"median_s": math.inf}, {"count": 0},
        {"count": 10**400}, {"spread_s": math.nan}, {"spread_s": -0.1}, {"lasted_s": math.inf}, {"age_s": -1.0},
    ],
)  # fmt: skip
def test_what_cannot_be_is_dropped(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            await line.beat(generation, window(1, generation, **({"lasted_s": 1.0} | wrong)))
            assert (p.steps, p.rate) == ({}, 0.0)
            await line.beat(generation, window(2, generation))
            assert p.steps == {1: 8}

    play(story())


@pytest.mark.parametrize(
    "wrong", [{"total": 10**400}, {"total": -5}, {"applied": 10**400}, {"paused_s": math.inf}, {"paused_s": math.nan}]
)
def test_whatever_workers_say_can_be_decided_upon(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            await line.beat(generation, total=100)
            await line.beat(generation, **wrong)
            seen = view.snapshot([p.active], Cluster((NODE,)), p.estimates, p.now_s, {})
            assert seen.remaining[0] > 0 or "applied" in wrong
            assert math.isfinite(seen.resize_s[0])
            assert math.isfinite(p.active.progress.event().paused_s)

    play(story())


def test_of_workers_that_time_nothing_no_speed_is_known(tmp_path: Path) -> None:
    """Those of an older version."""

    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            for second in range(5):
                p.now_s += 1.0
                await line.beat(generation, applied=10 * second, step=10 * second)
            assert (p.active.progress.steps, p.rate, p.steps) == (40, 0.0, {})

    play(story())


def test_the_speed_is_what_the_clock_counts(tmp_path: Path) -> None:
    """Of a script that evaluates for two seconds after fifty steps of 10 ms, in leaps."""

    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            begun_s = p.now_s
            for beat in range(1, 41):
                p.now_s = begun_s + beat * 0.5
                whole, part_s = divmod(p.now_s - begun_s, 2.5)
                done = round(50 * whole + min(part_s / 0.01, 50))
                told = window(beat, generation, median_s=0.01, count=30, lasted_s=0.3)
                await line.beat(generation, told, applied=done, step=done)
            assert p.rate == pytest.approx(20.0, rel=0.1)
            assert p.estimates.rate(1, "digits", "cpu", 1) == pytest.approx(20.0, rel=0.15)
            assert p.estimates.rate(1, "digits", "cpu", 2) < 25.0, "more workers do not evaluate faster"
            p.driver.prepare(2)
            p.launch("w1")
            newcomer = await p.join("w1")
            await line.form()
            generation = await newcomer.form()
            await line.beat(generation, window(50, generation, 2, median_s=0.005, count=60, lasted_s=0.3), applied=done)
            assert 20.0 < p.rate < 25.0, "what it does beside its steps is not forgotten"

    play(story())


def test_what_a_neighbour_takes_as_it_starts_is_no_work_of_the_script(tmp_path: Path) -> None:
    """Its windows are dropped; if its time were counted by the clock, it would seem to pass beside every step."""

    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation, done = await line.form(), 0
            for second in range(60):
                slow = 20 <= second < 40
                p.now_s += 1.0
                p.disturbed_s = p.now_s if slow else p.disturbed_s
                done += 2 if slow else 10
                told = window(second + 1, generation, median_s=0.5 if slow else 0.1)
                await line.beat(generation, told, applied=done, step=done)
            assert p.rate == pytest.approx(10.0)
            assert p.estimates.rate(1, "digits", "cpu", 1) == pytest.approx(10.0)
            alone = Estimates()
            alone.remember(1, p.estimates.measured(1))
            assert p.estimates.rate(1, "digits", "cpu", 4) == alone.rate(1, "digits", "cpu", 4)

    play(story())


def test_a_worker_that_times_nothing_is_counted_all_the_same(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            for second in range(15):
                p.now_s += 1.0
                await line.beat(generation, applied=10 * second, step=10 * second)
            assert (p.rate, p.steps) == (pytest.approx(10.0), {})

    play(story())


def test_what_is_timed_while_newcomers_start_does_not_count(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            p.now_s += 10.0
            p.launch("w1")
            p.now_s += 0.5
            before = window(1, generation, lasted_s=1.0, age_s=0.6)
            beside, across = window(2, generation, lasted_s=0.4), window(3, generation, lasted_s=2.0)
            await line.beat(generation, before, beside, across)
            assert p.steps == {1: 8}, "only what ended before the launch"
            newcomer = await p.join("w1")
            await line.form()
            formed = await newcomer.form()
            await line.beat(formed, window(4, formed, 2, lasted_s=0.4))
            assert p.steps == {1: 8, 2: 8}, "the first window after the switch counts"

    play(story())


def test_after_a_newcomer_that_never_came_windows_count_again(tmp_path: Path) -> None:
    from stretto.backends.protocol import Exit

    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            generation = await line.form()
            p.launch("w1")
            p.now_s += 5.0
            await line.beat(generation, window(1, generation, lasted_s=0.4))
            p.now_s += 2.0
            gone = p.active.job.workers[1]
            p.active.job = msgspec.structs.replace(p.active.job, workers=p.active.job.workers[:1])
            p.driver.exited(gone, Exit(launch=gone.launch, how="signalled", status=9, at_s=p.now_s), 1)
            p.now_s += 1.0
            await line.beat(generation, window(2, generation, lasted_s=2.0), window(3, generation, lasted_s=0.5))
            assert p.steps == {1: 8}, "that which began after it was gone"

    play(story())


def test_another_size_has_the_speed_that_is_expected_until_it_was_timed(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            p.estimates.observe(1, "cpu", curves.Window(2, 80, 0.06, 0.0, 0.0, 1.0))
            line = await p.join("w0")
            generation = await line.form()
            await line.beat(generation, window(1, generation))
            assert (p.rate, p.active.progress.window is not None) == (pytest.approx(10.0), True)
            p.launch("w1")
            newcomer = await p.join("w1")
            await line.form()
            generation = await newcomer.form()
            p.now_s += 0.3
            await line.beat(generation)
            assert p.rate == pytest.approx(1 / 0.06, rel=0.05), "what is known of two workers"
            assert p.active.progress.window is None
            await line.beat(generation, window(2, generation, 2, median_s=0.05))
            assert (p.rate, p.active.progress.window is not None) == (pytest.approx(20.0), True)

    play(story())


def test_a_job_that_was_done_before_the_server_started_has_a_driver_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path) as p:
            line = await p.join("w0")
            await line.form()
            line.say(m.Bye(reason="finished"))
            await p.driver.coordination.finished()
        async with played(tmp_path) as p:
            assert p.driver.state.done
            assert p.rate == 0

    play(story())


# With workers that train.

SCRIPT = """
import os, time, torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

x = torch.randn(64, 4)
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
last_s, size = time.monotonic(), 0
with open(f"steps-{os.environ['STRETTO_WORKER']}", "w", buffering=1) as notes:
    for batch in job.batches(TensorDataset(x, x.sum(1, keepdim=True)), size=16, epochs=100000):
        now_s = time.monotonic()
        print(size == job.size and job.size, now_s - last_s, file=notes)
        last_s, size = now_s, job.size
        time.sleep(0.02)
        ((model(batch[0]) - batch[1]) ** 2).mean().backward()
        opt.step(); opt.zero_grad()
        if os.path.exists("enough"):
            job.stop()
"""


def timed(folder: Path, size: int) -> float:
    """The median of what the script saw of its own steps on so many workers."""
    rows = [line.split() for line in (folder / "steps-w0").read_text().splitlines()]
    return statistics.median(float(seconds) for workers, seconds in rows if workers == str(size))


async def shown(m: Machine, job: Job, workers: int, windows: int) -> answers.JobAnswer:
    """What the API says of it, once it was timed on so many workers for so long."""

    def known(job: Job) -> bool:
        told = answers.job(m.plane, job)
        steps = sum(speed.steps for speed in told.speeds if speed.workers == workers)
        return told.rate_timed and len(job.workers) == workers and steps >= 8 * windows

    return answers.job(m.plane, await m.until(job, known, f"timed on {workers} workers"))


def test_the_speed_of_every_size_is_what_its_steps_took(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "train.py").write_text(SCRIPT)
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            job = await m.submit(
                f"{sys.executable} train.py",
                elastic={"min": 1, "max": 1},
                level="elastic",
                env={"OMP_NUM_THREADS": "1"},
            )
            for size in (1, 2):
                await m.plane.scale(job.id, size, size, "me")
                told = await shown(m, job, size, 1)
                assert told.rate == pytest.approx(1 / timed(tmp_path, size), rel=0.4), "already the first window"
                told = await shown(m, job, size, 6)
                (speed,) = (speed for speed in told.speeds if speed.workers == size)
                assert speed.rate == pytest.approx(1 / timed(tmp_path, size), rel=0.15)
                assert 0 < speed.rate <= 50
                assert told.eta_s == pytest.approx(((told.total_steps or 0) - told.steps) / told.rate, rel=0.05)
            assert [speed.workers for speed in told.speeds] == [1, 2]
            (tmp_path / "enough").touch()
            await m.ended(job)

    play(story())


def test_what_was_measured_of_a_job_outlives_the_server(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "train.py").write_text(SCRIPT)
        async with machine_of(tmp_path, "1x1", warm=True) as m:
            job = await m.submit(
                f"{sys.executable} train.py",
                elastic={"min": 1, "max": 1},
                level="elastic",
                env={"OMP_NUM_THREADS": "1"},
            )
            await shown(m, job, 1, 2)
            (before,) = curves.measured(m.plane.loop.estimates.measured(job.number)["cpu"])
        async with machine_of(tmp_path, "1x1", warm=True) as m:
            (again,) = curves.measured(m.plane.loop.estimates.measured(job.number)["cpu"])
            assert (again.workers, again.steps) == (1, pytest.approx(before.steps, abs=16))
            (tmp_path / "enough").touch()
            await m.ended(job)
        async with machine_of(tmp_path, "1x1") as m:
            assert m.plane.loop.estimates.all_measured() == {}

    play(story())


def test_it_is_stored_now_and_then_and_goes_with_the_job(tmp_path: Path) -> None:
    """A server that is killed has stored it, too."""

    async def story() -> None:
        async with played_machine.played(tmp_path, 2) as m:
            job = await m.begun("one", elastic={"min": 1, "max": 2, "explore": False})
            m.plane.loop.estimates.observe(job.number, "cpu", curves.Window(1, 8, 0.1, 0.0, 0.0, 0.8))
            await m.after()
            assert "measured" not in m.plane.store.load().settings, "not at every decision"
            await m.after(11.0)
            await m.comes(lambda: str(job.number) in m.plane.store.load().settings.get("measured", {}))
            m.backend.finish(job)
            await m.until(job, lambda job: job.ended)
            await m.after(11.0)
            await m.comes(lambda: m.plane.store.load().settings["measured"] == {})

    play(story())
