"""The application on a socket: uvicorn inside an event loop that belongs to somebody else.

Signals are the caller's. WebSockets have no pings of uvicorn's: a worker that freezes keeps its connection. Their
messages are short until the application says otherwise. Whoever sends headers without end is answered with 431 and hung
up on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from stretto.api.websockets import BoundedWebSocket
from stretto.errors import Occupied, UsageError
from stretto.runtime.messages import LONGEST_UNPROVEN

_MOST_HEADER_BYTES = 2**16
_KEEP_ALIVE_S = 75
_GRACE_S = 2


def bind(host: str, port: int) -> socket.socket:
    """Listen there; 0 is any free port. Raises `Occupied`, or `UsageError` for what cannot be listened on."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port", hint="give a number up to 65535, or 0 for any that is free")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"{host}:{port} is no address to listen on: {error}", hint="give another host") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise Occupied(
                f"port {port} on {host} is in use by another program", hint="end it, or choose another with --port"
            ) from None
        raise UsageError(f"{host}:{port} cannot be listened on: {error.strerror}", hint="give another port") from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """As others write it: `127.0.0.1:8470`. Who listens everywhere can be reached here."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer:
    """`start`, and `stop` when everything that is being answered should come to its end."""

    def __init__(self, app: FastAPI, listening: socket.socket) -> None:
        self._app, self._socket = app, listening
        config = uvicorn.Config(
            app,
            loop="none",
            http=_http_protocol(),
            ws=BoundedWebSocket,
            ws_max_size=LONGEST_UNPROVEN,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        self._app.state.parts.stop()
        self._server.end()
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready, self._ended = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ended.wait()


def _http_protocol() -> Any:
    """httptools where it is installed, with a limit on headers that it does not have itself."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        _in_head = True
        _head_bytes = _counted = 0

        def data_received(self, data: bytes) -> None:
            if self._in_head:
                self._head_bytes += len(data)
            super().data_received(data)
            # A header that has no end yet is not told to us.
            if self._in_head and self._head_bytes > _MOST_HEADER_BYTES and not self.transport.is_closing():
                self._counted = self._head_bytes
                self.send_400_response("")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._counted = 0

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head, self._head_bytes = False, 0
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head = True
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self._counted <= _MOST_HEADER_BYTES:
                super().send_400_response(msg)
                return
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

        def _count(self, size: int) -> None:
            self._counted += size
            if self._counted > _MOST_HEADER_BYTES:
                raise ValueError("headers without end")

    return Bounded
