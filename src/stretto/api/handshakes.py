"""Whoever connects to a port with TLS, up to the end of the handshake.

The event loop alone would wait a minute for every handshake, however many there are, and tell nobody of them. So they
are let in here: each has a few seconds, and when there are too many the one that has waited longest goes, first of the
same address. Whoever begins in plain HTTP is told what is spoken here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from starlette.responses import Response

from stretto.api import problems
from stretto.api.bounds import Limits, counted_as

_HANDSHAKE = b"\x16"
"""What TLS begins with."""
_AT_ONCE = 64
_PAUSE_S = 0.1
_READ_BYTES = 2**16

_log = logging.getLogger("stretto.api")


class SpeaksTls(problems.Malformed):
    """Plain HTTP came where TLS is spoken."""

    code = "speaks-tls"


class Handshakes:
    """Of one socket that listens; to uvicorn it is a server as the event loop makes them."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        limits: Limits,
    ) -> None:
        self._listening, self._context, self._protocol, self._limits = listening, context, protocol, limits
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[asyncio.Task[None], str] = {}
        """Who has waited longest is first; with their addresses, as they are counted."""
        self._pause: asyncio.TimerHandle | None = None
        self._full = False
        """There were no descriptors the last time."""
        self._open()

    def close(self) -> None:
        """Nobody else comes in; it is called before the socket is closed."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        for task in self._waiting:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._waiting, return_exceptions=True)

    def _open(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # No descriptors: those who are here may end in the meantime.
                if not self._full:
                    _log.warning("nobody can be let in now: %s", error.strerror)
                self._full = True
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(_PAUSE_S, self._open)
                return
            self._full = False
            connection.setblocking(False)
            self._let_in(connection, counted_as(str(address[0])))

    def _let_in(self, connection: socket.socket, address: str) -> None:
        same = [task for task, other in self._waiting.items() if other == address and address]
        if len(same) >= self._limits.per_address:
            self._send_away(same[0])
        elif len(self._waiting) >= self._limits.handshakes:
            self._send_away(next(iter(self._waiting)))
        task = self._loop.create_task(self._shake(connection))
        self._waiting[task] = address
        task.add_done_callback(lambda task: self._waiting.pop(task, None))

    def _send_away(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        del self._waiting[task]

    async def _shake(self, connection: socket.socket) -> None:
        """Whatever goes wrong costs the guest its connection, and nobody anything else. From the handshake on the
        connection is the event loop's, which closes it."""
        first = b""
        try:
            async with asyncio.timeout(self._limits.header_s):
                first = await self._first(connection)
        except OSError:
            # A time that is over is such an error, too.
            pass
        finally:
            if first != _HANDSHAKE:
                if first:
                    _explain(connection)
                connection.close()
        if first == _HANDSHAKE:
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    self._protocol, connection, ssl=self._context, ssl_handshake_timeout=self._limits.header_s
                )

    async def _first(self, connection: socket.socket) -> bytes:
        """Its first byte, which stays unread; empty if it has hung up."""
        readable = asyncio.Event()
        self._loop.add_reader(connection, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(connection)
        return connection.recv(1, socket.MSG_PEEK)


def _explain(connection: socket.socket) -> None:
    """In the language in which they have asked."""
    told: Response = problems.response(
        SpeaksTls("this port speaks TLS, and that was plain HTTP", hint="write https:// in the address")
    )
    body = bytes(told.body)
    head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: {told.media_type}\r\ncontent-length: {len(body)}\r\n"
    with contextlib.suppress(OSError):
        # What is left unread would break the connection before the answer has arrived.
        connection.recv(_READ_BYTES)
        connection.send(head.encode() + b"connection: close\r\n\r\n" + body)
        connection.shutdown(socket.SHUT_WR)
