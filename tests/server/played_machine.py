"""A control plane in this process with the real loop and a real store, on a machine that is played: its workers are
entries of a table, and its clock can be put forward."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stretto.backends.protocol import Exit, Launch, News, Node, Started
from stretto.jobs import events as e
from stretto.jobs.model import Context, Job
from stretto.server.plane import Plane
from stretto.spec.model import JobFile
from stretto.store import Store

DEADLINE_S = 60.0


class Clock:
    """Time goes by as it does, and can be put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s  # noqa: TID251


class PlayedBackend:
    """Programs that end when they are asked to, or as the test says."""

    def __init__(self, nodes: tuple[Node, ...], clock: Clock) -> None:
        self._nodes, self._clock = nodes, clock
        self.living: dict[str, Launch] = {}
        self.when_asked: dict[int, Callable[[Launch], int | None]] = {}
        """By job: what its program does, and its exit code then; None: it goes on."""
        self.deaf: set[int] = set()
        """Jobs whose programs hear nothing, and take their time to be killed."""
        self.slow = False
        """Whether launches take until `arrive` is called."""
        self._tell: Callable[[News], None] = lambda news: None
        self._adopted: set[str] = set()

    async def open(self, known: Iterable[str], tell: Callable[[News], None]) -> None:
        self._tell = tell
        self._adopted = set(known)

    def attends(self, launch: str) -> bool:
        return launch in self.living or launch in self._adopted

    def warm_up(self, env: Mapping[str, str]) -> None:
        return

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    async def launch(self, launch: Launch) -> None:
        self.living[launch.id] = launch
        if not self.slow:
            self._tell(Started(launch=launch.id, pid=1000 + len(self.living), how="plain"))

    def arrive(self) -> None:
        """Whoever is being launched has a process."""
        for pid, launch in enumerate(self.living, 2000):
            self._tell(Started(launch=launch, pid=pid, how="plain"))

    def terminate(self, launch: str) -> None:
        if launch not in self.living or self.living[launch].job in self.deaf:
            return
        does = self.when_asked.get(self.living[launch].job)
        if does is None:
            self._end(Exit(launch=launch, how="signalled", status=15, asked=True))
        elif (code := does(self.living[launch])) is not None:
            self._end(Exit(launch=launch, how="exited", status=code, asked=True))

    def kill(self, launch: str) -> None:
        if launch in self.living and self.living[launch].job in self.deaf:
            return
        self._end(Exit(launch=launch, how="signalled", status=9, asked=True))

    def forget(self, launch: str) -> None:
        return

    async def close(self) -> None:
        return

    def of(self, job: Job) -> list[Launch]:
        return [launch for launch in self.living.values() if launch.job == job.number]

    def finish(self, job: Job, how: Any = "exited", status: int = 0) -> None:
        for launch in self.of(job):
            self._end(Exit(launch=launch.id, how=how, status=status))

    def _end(self, exit: Exit) -> None:
        if self.living.pop(exit.launch, None) is not None:
            # As if it came from outside, not in the middle of what the loop does.
            asyncio.get_running_loop().call_soon(self._tell, exit)


class Played:
    def __init__(self, plane: Plane, backend: PlayedBackend, clock: Clock, folder: Path) -> None:
        self.plane, self.backend, self.clock, self._folder = plane, backend, clock, folder

    async def submit(self, name: str, user: str = "me", **fields: Any) -> Job:
        file = JobFile.model_validate({"run": "work", "name": name, **fields})
        return await self.plane.submit(file, Context(cwd=str(self._folder)), user)

    async def begun(self, name: str, **fields: Any) -> Job:
        """A job that has the workers it was given."""
        job = await self.submit(name, **fields)
        return await self.until(job, lambda job: bool(job.workers) and all(w.pid for w in job.workers))

    async def until(self, job: Job, condition: Callable[[Job], bool]) -> Job:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition(found := await self.plane.job(job.id)):
            assert time.monotonic() < deadline_s, f"{found}\n{await self.plane.why(job.id)}"
            await asyncio.sleep(0.002)
        return found

    async def after(self, seconds: float = 0.0) -> None:
        """Put the clock forward, and let it be decided and acted twice on what is then."""
        self.clock.ahead_s += seconds
        for _ in range(2):
            before, deadline_s = self.plane.loop.decisions, time.monotonic() + DEADLINE_S
            self.plane.loop.wake(decide=True, urgent=True)
            while self.plane.loop.decisions == before:
                assert time.monotonic() < deadline_s, self.plane.loop.trouble or "nothing is decided"
                await asyncio.sleep(0.002)
        await self.plane.book.settled()

    async def comes(self, look: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not look():
            assert time.monotonic() < deadline_s, "it did not come about in time"
            await asyncio.sleep(0.002)

    async def reason(self, job: Job) -> tuple[str, str]:
        why = await self.plane.why(job.id)
        return why.reason, why.text

    async def events(self, job: Job, kind: type[Any]) -> list[Any]:
        await self.plane.book.settled()
        found = await self.plane.events(job.id, 0, 1000)
        return [recorded.event for recorded in found if isinstance(recorded.event, kind)]

    async def interruptions(self, job: Job) -> list[e.Interrupted]:
        return await self.events(job, e.Interrupted)

    def joins(self, job: Job) -> None:
        """As if the script of an elastic job had taken part."""
        self.plane.book.record(job.number, e.Kept(how="its script has joined"))

    def save(self, launch: Launch) -> None:
        """What a program does that writes a checkpoint at this moment."""
        path = Path(launch.env["STRETTO_CHECKPOINT_DIR"]) / "state.pt"
        path.write_text("weights")
        os.utime(path, (self.clock(), self.clock()))


@contextlib.asynccontextmanager
async def played(
    folder: Path, *devices: int, policy: str = "", clock: Clock | None = None, **more: Any
) -> AsyncIterator[Played]:
    data, clock = folder / "data", clock or Clock()
    data.mkdir(exist_ok=True)
    nodes = tuple(
        Node(name=f"node-{i}", pool="cpu", devices=count, cpu_milli=64_000, memory_mib=64_000)
        for i, count in enumerate(devices)
    )
    backend = PlayedBackend(nodes, clock)
    store = Store.open(str(data / "stretto.db"), clock=clock)
    plane = Plane(data, store, backend, url=lambda: "ws://127.0.0.1:9", clock=clock, policy=policy, **more)
    await plane.open()
    try:
        yield Played(plane, backend, clock, folder)
    finally:
        await plane.close()
        store.close()
