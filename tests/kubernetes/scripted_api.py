"""An HTTP server that answers as a test tells it to, rudely if need be: what a real one does only once a year."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from stretto.kubernetes.access import Access, FixedCredentials


class Asked(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class Reply:
    """What to send back. One of the first three begins it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def json(self, content: Any, status: int = 200, **headers: str) -> None:
        self.whole(json.dumps(content).encode(), status, **headers)

    def whole(self, body: bytes, status: int = 200, **headers: str) -> None:
        extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self._writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body)

    def begin(self) -> None:
        self._writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def piece(self, data: bytes) -> None:
        if data:
            self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def line(self, kind: str, item: Any) -> None:
        self.piece(json.dumps({"type": kind, "object": item}).encode() + b"\n")

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    async def sent(self) -> None:
        await self._writer.drain()

    def cut(self) -> None:
        self._writer.transport.abort()

    def hang_up(self) -> None:
        """Politely: what was sent arrives."""
        self._writer.close()


Script = Callable[[Asked, Reply], Awaitable[None]]


class ScriptedApi:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Access]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield Access(server=f"http://127.0.0.1:{port}", credentials=FixedCredentials("Bearer secret"))
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            early = b""
            while (asked := await _read(reader, early)) is not None:
                self.asked.append(asked)
                early = await self._answered(asked, reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self._tasks.discard(task)

    async def _answered(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Until the script is through or the client has gone; gives what came of the next request meanwhile."""
        script = asyncio.ensure_future(self._script(asked, Reply(writer)))
        listening = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({script, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done() and not script.done() and not listening.result():
                script.cancel()
            await script
        finally:
            script.cancel()
            listening.cancel()
            await asyncio.gather(script, listening, return_exceptions=True)
        return b"" if listening.cancelled() else listening.result()


async def _read(reader: asyncio.StreamReader, early: bytes) -> Asked | None:
    try:
        head = (early + await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, urlsplit(target).path, dict(parse_qsl(urlsplit(target).query)), headers, body)


def refusal(code: int, reason: str, message: str = "no", **details: Any) -> dict[str, Any]:
    """A Status object."""
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }
