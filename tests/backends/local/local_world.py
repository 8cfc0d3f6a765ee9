"""A local backend with real processes in a folder of the test's, and what it told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from stretto.backends.local import containment
from stretto.backends.local.backend import LocalBackend
from stretto.backends.local.runs import serving
from stretto.backends.protocol import Exit, Launch, News, Node, Started

NODES = (Node(name="n", pool="cpu", devices=4, cpu_milli=2000, memory_mib=4096),)

MEANS = {
    "cgroup.kill": containment.EVERYTHING,
    "freezer": containment.EVERYTHING - {"cgroup.kill"},
    "walk": frozenset[str](),
}
"""How a tree is ended → what must be allowed for it."""


class World:
    """A backend that is open, and its news in order."""

    def __init__(self, data: Path, backend: LocalBackend) -> None:
        self.data = data
        self.backend = backend
        self.news: list[News] = []

    def exits(self, launch: str) -> list[Exit]:
        return [each for each in self.news if isinstance(each, Exit) and each.launch == launch]

    def started(self, launch: str) -> list[Started]:
        return [each for each in self.news if isinstance(each, Started) and each.launch == launch]

    def describe(self, launch: str, *command: str, **changes: Any) -> Launch:
        words: dict[str, Any] = {
            "id": launch,
            "job": 1,
            "worker": "w0",
            "node": "n",
            "devices": (0,),
            "command": command,
            "cwd": str(self.data.parent),
            "env": dict(os.environ),
            "log": str(self.data / "logs" / f"{launch}.log"),
            "warm": False,
        }
        return Launch(**{**words, **changes})

    async def launch(self, launch: str, *command: str, **changes: Any) -> None:
        await self.backend.launch(self.describe(launch, *command, **changes))

    async def script(self, launch: str, text: str, *args: str, **changes: Any) -> None:
        """Run a Python script."""
        path = self.data.parent / f"{launch}.py"
        path.write_text(text)
        await self.launch(launch, sys.executable, path.name, *args, **changes)

    async def ended(self, launch: str) -> Exit:
        await until(lambda: self.exits(launch))
        (exit,) = self.exits(launch)
        return exit

    def log(self, launch: str) -> str:
        return (self.data / "logs" / f"{launch}.log").read_text()

    def supervisor(self, launch: str) -> int:
        running = self.backend.runs.running(launch)
        assert running is not None
        return running.pid


async def until(what: Any, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"still not so after {timeout_s} s"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def world(data: Path, known: Iterable[str] = (), *, leave: bool = False, **options: Any) -> AsyncIterator[World]:
    """Open, and at the end kill all that runs, unless it is to be left for the next one."""
    options = {"warm": False, "preload": ("json",), **options}
    with serving(data):
        backend = LocalBackend(data, NODES, **options)
        here = World(data, backend)
        await backend.open(known, here.news.append)
        try:
            yield here
        finally:
            if not leave:
                living = {each.launch for each in here.news} - {x.launch for x in here.news if isinstance(x, Exit)}
                for launch in living:
                    backend.kill(launch)
                for launch in living:
                    await here.ended(launch)
            await backend.close()
