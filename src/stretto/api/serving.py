"""The application on a socket: uvicorn inside an event loop that belongs to somebody else.

Signals are the caller's. WebSockets have no pings of uvicorn's: a worker that freezes keeps its connection. How long
and how much others may send, and how many there may be, is in `bounds`; messages are short until the application says
otherwise (`websockets`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from stretto.api import bounds
from stretto.api.handshakes import Handshakes
from stretto.api.tls import Tls
from stretto.api.websockets import BoundedWebSocket
from stretto.errors import Occupied, UsageError
from stretto.runtime.messages import LONGEST_UNPROVEN

_KEEP_ALIVE_S = 75
_GRACE_S = 2


def bind(host: str, port: int, *, insecure: bool = True) -> socket.socket:
    """Listen there; 0 is any free port. Raises `Occupied`, or `UsageError` for what cannot be listened on; unless it is
    called insecure (or there is TLS), that is every address that others than this machine reach."""
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port", hint="give a number up to 65535, or 0 for any that is free")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
        listening = socket.socket(family, kind, proto)
    except OSError as error:
        raise UsageError(f"{host}:{port} is no address to listen on: {error}", hint="give another host") from None
    if not insecure and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        listening.close()
        raise UsageError(
            f"at {host} tokens and logs would be sent where others can read them: nothing is encrypted",
            hint="add --tls, listen on 127.0.0.1 behind a proxy or tunnel, or say --insecure on a network you trust",
        )
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

    def __init__(
        self,
        app: FastAPI,
        listening: socket.socket,
        limits: bounds.Limits | None = None,
        tls: Tls | None = None,
        local: socket.socket | None = None,
    ) -> None:
        """`local`: a Unix socket beside it, for those who need no token there."""
        self._app, self._socket = app, listening
        limits = limits or bounds.Limits.here()
        config = uvicorn.Config(
            app,
            loop="none",
            http=bounds.protocol(limits),
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
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        self._server = _Server(config, limits, local)
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
    def __init__(self, config: uvicorn.Config, limits: bounds.Limits, local: socket.socket | None) -> None:
        super().__init__(config)
        self._limits, self._local = limits, local
        self.ready, self._ended = asyncio.Event(), asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Sockets with TLS are let in by us: nobody's handshake may take for ever, or lock others out."""
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self.servers += [
                cast(asyncio.Server, Handshakes(socket, self.config.ssl, self._protocol, self._limits))
                for socket in sockets or ()
            ]
        if self._local is not None:
            loop = asyncio.get_running_loop()
            self.servers.append(await loop.create_unix_server(self._protocol, sock=self._local))
        self.ready.set()

    def _protocol(self) -> asyncio.Protocol:
        """As uvicorn makes one."""
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=None
        )
        return made

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._ended.wait()
