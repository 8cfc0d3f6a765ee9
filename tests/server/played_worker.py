"""A worker that is played: what it says to its coordinator, without a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from stretto.runtime import messages as m
from stretto.runtime.handshake import Secret
from stretto.runtime.introduction import introduced
from stretto.server.drivers.elastic import ElasticDriver


class Line:
    """A worker's connection, without a wire."""

    def __init__(self, driver: ElasticDriver, name: str) -> None:
        self.name = name
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._heard: asyncio.Queue[m.Message] = asyncio.Queue()
        self.task = asyncio.create_task(driver.coordination.serve(self))
        self._secret = Secret(driver.active.job.secret)
        self._then: list[m.Message] | None = []
        """What it says once it has introduced itself."""

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while True:
            yield await self._said.get()

    async def send(self, message: str) -> None:
        heard = m.decode(message)
        self._heard.put_nowait(heard)
        if isinstance(heard, m.Challenge) and self._then is not None:
            hello = m.Hello(worker=self.name, incarnation=f"i-{self.name}", address="h:1")
            for first in (introduced(hello, heard, self._secret), *self._then):
                self._said.put_nowait(m.encode(first))
            self._then = None

    async def close(self, code: int = 1000, reason: str = "") -> None:
        return

    def say(self, message: m.Message) -> None:
        if self._then is not None:
            self._then.append(message)
        else:
            self._said.put_nowait(m.encode(message))

    async def hear(self, kind: type[m.Message]) -> Any:
        while not isinstance(message := await self._heard.get(), kind):
            pass
        return message

    async def form(self) -> int:
        switch = await self.hear(m.Switch)
        self.say(m.Formed(generation=switch.generation, applied=0))
        return int(switch.generation)

    async def beat(self, generation: int, *windows: m.Window, **fields: Any) -> None:
        """Returns when it was taken in."""
        given = {"generation": generation, "loop": 0, "step": 0, "applied": 0, "windows": windows} | fields
        self.say(m.Heartbeat(**given))
        await self.hear(m.Alive)
