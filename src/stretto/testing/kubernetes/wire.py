"""A wire between programs that can be pulled: a TCP forwarder that knows nothing of what it carries.

Encryption stays end to end. With several targets it is a Service in miniature: every connection goes to one of those
that answer.

    async with Wire(lambda: [6443]) as wire:
        wire.drop()  # every connection is reset
        wire.cut()  # silence: nothing passes, nobody gets an error
        wire.mend()
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

_BLOCK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""Linger for no time at all."""


class Wire:
    """Listens on `port` of the loopback."""

    def __init__(self, targets: Callable[[], Sequence[int]], port: int = 0, rng: random.Random | None = None) -> None:
        self._targets, self.port, self._rng = targets, port, rng or random.Random()
        self._whole = asyncio.Event()
        self._whole.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def connections(self) -> int:
        return len(self._tasks)

    def drop(self) -> None:
        for writer in self._writers:
            # Without it a connection that is aborted looks as if it had been closed.
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            await _close(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        found = await self._reach()
        if found is None:
            return
        their_reader, their_writer = found
        self._writers.add(their_writer)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, their_writer))
                ways.create_task(self._pass(their_reader, writer))
        except* OSError:
            their_writer.transport.abort()
            writer.transport.abort()
        finally:
            self._writers.discard(their_writer)
            await _close(their_writer)

    async def _reach(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        targets = list(self._targets())
        self._rng.shuffle(targets)
        for port in targets:
            with contextlib.suppress(OSError):
                return await asyncio.open_connection("127.0.0.1", port)
        return None

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            await self._whole.wait()
            writer.write(block)
            await writer.drain()
        writer.write_eof()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
