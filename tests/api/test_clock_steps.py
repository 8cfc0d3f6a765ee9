"""A whole server whose machine's clock is set while it works: nothing that is counted notices."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from api_client import alive_in, eventually, options

from stretto.api.answers import event as told_event
from stretto.api.answers import job as told_job
from stretto.api.parts import Parts
from stretto.api.process import _opened
from stretto.api.serving import HttpServer
from stretto.backends.local.runs import serving
from stretto.clock import Clock, since_boot
from stretto.jobs.model import Context, Job
from stretto.server.plane import Plane
from stretto.spec.model import JobFile

PATIENCE_S = 60.0
LIMIT_S = 1800.0


class Machine:
    """Time goes by as it does; its clock can be set, and it can be looked away from for a while."""

    def __init__(self) -> None:
        self.step_s = self.passed_s = 0.0

    def wall(self) -> float:
        return time.time() + self.step_s + self.passed_s  # noqa: TID251

    def steady(self) -> float:
        return since_boot() + self.passed_s

    @contextlib.asynccontextmanager
    async def serving(self, folder: Path, **more: Any) -> AsyncIterator[tuple[Parts, Clock]]:
        data = folder / "data"
        data.mkdir(exist_ok=True)
        clock = Clock(self.wall, self.steady)
        with serving(data):
            async with _opened(options(data, nodes="1x2", **more), data, clock, "") as (app, listening, _):
                parts: Parts = app.state.parts
                server = HttpServer(app, listening)
                await server.start()
                try:
                    yield parts, clock
                except BaseException:
                    for active in parts.plane.book:
                        await parts.plane.wish(active.job.id, "cancel", "the test")
                    await until(lambda: not parts.plane.book.jobs)
                    raise
                finally:
                    await server.stop()


async def until(look: Callable[[], Any], what: str = "it") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline_s, f"{what} did not come about"
        await asyncio.sleep(0.01)


async def submit(plane: Plane, folder: Path, name: str, run: str = "", **fields: Any) -> Job:
    run = run or f"until [ -e {folder}/{name} ]; do sleep 0.05; done"
    file = JobFile.model_validate({"run": run, "name": name, "stop": {"grace": "5s"}, **fields})
    return await plane.submit(file, Context(cwd=str(folder)), "me")


async def phase(plane: Plane, job: Job, *phases: str) -> Job:
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := await plane.job(job.id)).phase not in phases or not all(worker.pid for worker in found.workers):
        assert time.monotonic() < deadline_s, f"{found}\n{await plane.why(job.id)}"
        await asyncio.sleep(0.01)
    return found


async def decided(plane: Plane) -> None:
    """Twice, on all that is known now."""
    for _ in range(2):
        before = plane.loop.decisions
        plane.loop.wake(decide=True, urgent=True)
        await until(lambda before=before: plane.loop.decisions > before, "a decision")


@pytest.mark.parametrize("steps_s", [(-600.0, 3600.0), (3600.0, -600.0)])
def test_scheduling_and_limits_go_on_as_without_the_step(tmp_path: Path, steps_s: tuple[float, float]) -> None:
    machine = Machine()

    async def story() -> None:
        async with machine.serving(tmp_path) as (parts, _):
            plane = parts.plane
            limited = await submit(plane, tmp_path, "limited", stop={"after": f"{LIMIT_S:g}s", "grace": "5s"})
            await phase(plane, limited, "running")
            for number, step_s in enumerate(steps_s):
                machine.step_s += step_s
                await decided(plane)
                again = f"again-{number}"
                # Decided, launched, ended by the machine, tried again after its back-off, ended well.
                run = f"[ -e {tmp_path}/{again} ] || {{ touch {tmp_path}/{again}; kill -9 $$; }}"
                ended = await phase(plane, await submit(plane, tmp_path, again, run), "succeeded", "failed")
                assert (ended.phase, ended.starts) == ("succeeded", 2), ended.message
                assert ended.ran_s + ended.waited_s < PATIENCE_S
                now_s, shown = machine.wall(), told_job(plane, ended)
                assert shown.started_s is not None
                assert shown.ended_s is not None
                assert now_s - PATIENCE_S < shown.submitted_s <= shown.started_s <= shown.ended_s <= now_s + 1.0
                assert (await plane.job(limited.id)).phase == "running"
            assert (await plane.job(limited.id)).ran_s < LIMIT_S
            # Its limit is reached when its time is over, whatever the clock says.
            machine.passed_s += LIMIT_S
            plane.loop.wake(decide=True)
            ended = await phase(plane, limited, "failed", "succeeded")
            assert "stop.after" in ended.message
            events = await plane.events(None, 0, 1000)
            times = [recorded.at_s for recorded in events]
            assert times == sorted(times)
            assert abs(told_event(events[-1], plane.told).at_s - machine.wall()) < PATIENCE_S

    asyncio.run(story())
    eventually(lambda: not alive_in(tmp_path / "data"))


TRAINING = """
import os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.batches(TensorDataset(torch.randn(64, 4)), size=16, epochs=10**6):
    optimizer.zero_grad(); model(batch[0]).square().mean().backward(); optimizer.step()
    if os.path.exists("go"):
        job.stop()
    time.sleep(0.02)
"""


def test_workers_that_train_together_do_not_notice(tmp_path: Path) -> None:
    """Their heartbeats count, their leases hold, and what they tell of their progress is heard."""
    machine = Machine()
    (tmp_path / "train.py").write_text(TRAINING)

    async def story() -> None:
        async with machine.serving(tmp_path) as (parts, _):
            plane = parts.plane
            about = {"elastic": {"min": 2, "max": 2}, "env": {"OMP_NUM_THREADS": "1"}}
            job = await submit(plane, tmp_path, "train", f"exec {sys.executable} train.py", **about)
            await phase(plane, job, "running")
            progress = plane.book.jobs[job.number].progress
            for step_s in (0.0, -600.0, 3600.0):
                machine.step_s += step_s
                before = progress.steps
                await until(lambda before=before: progress.steps > before + 20, "progress")
            found = await plane.job(job.id)
            assert (found.phase, found.starts, found.launches, found.failures) == ("running", 1, 2, 0)
            (tmp_path / "go").touch()
            ended = await phase(plane, job, "succeeded", "failed")
            assert (ended.phase, ended.launches) == ("succeeded", 2), ended.message

    asyncio.run(story())
    eventually(lambda: not alive_in(tmp_path / "data"))


def test_the_next_server_counts_on_where_the_last_one_was(tmp_path: Path) -> None:
    """The clock is set while nobody is there; who ran has run no longer for it."""
    machine = Machine()

    async def story() -> None:
        async with machine.serving(tmp_path) as (parts, clock):
            job = await submit(parts.plane, tmp_path, "limited", stop={"after": f"{LIMIT_S:g}s", "grace": "5s"})
            await phase(parts.plane, job, "running")
            before_s = clock()
        machine.step_s += 3600.0
        async with machine.serving(tmp_path) as (parts, clock):
            assert 0 <= clock() - before_s < LIMIT_S
            await decided(parts.plane)
            found = await phase(parts.plane, job, "running", "failed")
            assert (found.phase, found.starts) == ("running", 1)
            (tmp_path / "limited").touch()
            await phase(parts.plane, job, "succeeded")

    asyncio.run(story())
    eventually(lambda: not alive_in(tmp_path / "data"))
