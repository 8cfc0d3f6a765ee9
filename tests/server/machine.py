"""A control plane in this process, on a real store and a real backend, with real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from stretto.backends.local import machine
from stretto.backends.local.backend import LocalBackend
from stretto.backends.local.runs import serving
from stretto.clock import Clock
from stretto.jobs.model import Context, Job
from stretto.server.plane import Plane
from stretto.spec.model import JobFile
from stretto.store import Store

DEADLINE_S = 60.0
LONGEST_S = 300.0


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's story. One that stands still fails."""

    async def bounded() -> None:
        async with asyncio.timeout(LONGEST_S):
            await story

    asyncio.run(bounded())


class Machine:
    def __init__(self, plane: Plane, folder: Path) -> None:
        self.plane, self.folder = plane, folder

    async def submit(self, run: str | list[str], **fields: Any) -> Job:
        file = JobFile.model_validate({"run": run, **fields})
        return await self.plane.submit(file, Context(cwd=str(self.folder)), "me")

    async def until(self, ref: str | Job, condition: Callable[[Job], bool], what: str) -> Job:
        """The job once the condition holds."""
        name = ref if isinstance(ref, str) else ref.id
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            job = await self.plane.job(name)
            self._check()
            if condition(job):
                return job
            if time.monotonic() > deadline_s:
                told = [f"not {what}: {job}", str(await self.plane.why(name)), await self.story(name), self.logs(job)]
                raise AssertionError("\n".join(told))
            await asyncio.sleep(0.01)

    def _check(self) -> None:
        """What must hold at any moment."""
        book = self.plane.book
        for active in book:
            job = active.job
            waits = not (active.target or job.workers or job.helpers or job.node or job.wish != "run")
            assert waits or active.number in book.lively, f"{job} is not looked after"
        assert book.lively.keys() <= book.jobs.keys()

    async def ended(self, ref: str | Job, phase: str = "succeeded") -> Job:
        job = await self.until(ref, lambda job: job.ended, "ended")
        assert job.phase == phase, f"{job.phase}: {job.message}\n{self.logs(job)}"
        return job

    async def running(self, ref: str | Job, workers: int) -> Job:
        return await self.until(ref, lambda job: len(job.workers) == workers, f"{workers} workers")

    async def reason(self, ref: Job, reason: str) -> None:
        """Wait until this is why it has the workers it has."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (why := await self.plane.why(ref.id)).reason != reason:
            assert time.monotonic() < deadline_s, why
            await asyncio.sleep(0.01)

    async def story(self, name: str) -> str:
        events = await self.plane.events(name, 0, 1000)
        return "\n".join(f"{one.at_s - events[0].at_s:8.3f} {one.event}" for one in events[1:])

    async def kinds(self, ref: Job) -> list[str]:
        events = await self.plane.events(ref.id, 0, 1000)
        return [type(recorded.event).__name__.lower() for recorded in events]

    def logs(self, job: Job) -> str:
        folder = self.plane.logs(job)
        return "\n".join(f"-- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*.log")))


@contextlib.asynccontextmanager
async def machine_of(folder: Path, shape: str = "1x4", *, policy: str = "", **more: Any) -> AsyncIterator[Machine]:
    """Opened on a data directory that may have been used before; closed without ending what runs."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    found, clock = machine.discover(shape, gpus=[]), Clock()
    store = Store.open(str(data / "stretto.db"), clock=clock.wall)
    warm, away_s = more.pop("warm", False), more.pop("away_s", 600.0)
    backend = LocalBackend(data, found.nodes, machine=found, warm=warm, away_s=away_s)
    port = 0
    plane = Plane(
        data, store, backend, url=lambda: f"ws://127.0.0.1:{port}", clock=clock, policy=policy, **more
    )  # fmt: skip

    async def join(socket: ServerConnection) -> None:
        assert socket.request is not None
        await plane.join(socket.request.path.split("/")[3], socket)

    with serving(data):
        async with serve(join, "127.0.0.1", _port(data), ping_interval=None, max_size=2**24) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            (data / "port").write_text(str(port))
            await plane.open()
            try:
                yield Machine(plane, folder)
            except BaseException:
                await _end_all(plane)
                raise
            finally:
                await plane.close()
                store.close()


async def _end_all(plane: Plane) -> None:
    """A test that has failed leaves nothing running."""
    for active in plane.book:
        if not active.job.ended:
            with contextlib.suppress(Exception):
                await plane.wish(active.job.id, "cancel", "the test")
    deadline_s = time.monotonic() + DEADLINE_S
    while any(active.job.workers or active.job.helpers for active in plane.book) and time.monotonic() < deadline_s:
        for active in plane.book:
            for process in (*active.job.workers, *active.job.helpers):
                plane.backend.kill(process.launch)
        await asyncio.sleep(0.05)


def _port(data: Path) -> int:
    """The same one after a restart."""
    with contextlib.suppress(OSError):
        return int((data / "port").read_text())
    return 0
