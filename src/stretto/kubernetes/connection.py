"""HTTP/1.1 to one server, and no more of it than the Kubernetes API needs: a pool of keep-alive connections.

A general HTTP client costs 0.6 to 0.8 ms of CPU per request, this one less than 0.1 ms; a controller that creates and
binds a thousand pods a second feels that. One connection carries one request at a time. Answers come whole
(`exchange`) or in pieces as they arrive (`stream`, for watches and logs). Errors are OSError, TimeoutError and
`Broken`; whether to try again is the caller's decision, helped by `Broken.was_sent`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

BUFFERED_BYTES = 4 << 20
"""How much of a stream may wait for its reader before the server is held back."""
IDLE_S = 30.0
"""Older connections are not used again: the server may be closing them just then."""
PROXY_REPLY_BYTES = 64 << 10


class Broken(ConnectionError):
    """The connection ended, or what came is not HTTP. `was_sent`: the server may have acted on the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


class Answer(NamedTuple):
    status: int
    retry_after_s: float | None
    body: bytes


class Place(NamedTuple):
    """Where connections lead."""

    server: str
    tls: ssl.SSLContext | None
    server_name: str
    proxy: str


class Pool:
    """At most `limit` requests at once, on connections that are kept; streams have their own."""

    def __init__(self, place: Place, *, limit: int, connect_timeout_s: float) -> None:
        self._place = place
        self._connect_timeout_s = connect_timeout_s
        self._turns = asyncio.Semaphore(limit)
        self._idle: list[tuple[Connection, float]] = []
        self._streams: set[Connection] = set()

    async def exchange(self, request: bytes, timeout_s: float) -> Answer:
        """Send a request, give its whole answer."""
        async with self._turns:
            connection = await self._connection()
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await connection.exchange(request)
            except BaseException:
                connection.abort()
                raise
            if connection.is_reusable:
                self._idle.append((connection, asyncio.get_running_loop().time()))
            else:
                connection.abort()
            return answer

    @asynccontextmanager
    async def stream(self, request: bytes, timeout_s: float) -> AsyncIterator[Stream]:
        """Send a request, give its answer's head, then the body as it comes."""
        connection = await self._open()
        self._streams.add(connection)
        try:
            async with asyncio.timeout(timeout_s):
                status = await connection.begin_stream(request)
            yield Stream(connection, status)
        finally:
            self._streams.discard(connection)
            connection.abort()

    def close(self) -> None:
        for connection in (*(connection for connection, _ in self._idle), *self._streams):
            connection.abort()
        self._idle.clear()

    async def _connection(self) -> Connection:
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.is_reusable and asyncio.get_running_loop().time() - since_s < IDLE_S:
                return connection
            connection.abort()
        return await self._open()

    async def _open(self) -> Connection:
        async with asyncio.timeout(self._connect_timeout_s):
            return await _connect(self._place)


class Stream:
    """An answer whose body is still coming."""

    def __init__(self, connection: Connection, status: int) -> None:
        self._connection = connection
        self.status = status

    async def pieces(self, quiet_s: float) -> AsyncIterator[bytes]:
        """The body in the pieces it came in; TimeoutError when nothing came for so long."""
        while True:
            async with asyncio.timeout(quiet_s):
                piece = await self._connection.next_piece()
            if piece is None:
                return
            yield piece
            # A busy stream is always ready; others want the event loop too.
            await asyncio.sleep(0)


class Connection(asyncio.Protocol):
    """One connection; the methods from `on_header` on are the parser's callbacks."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._retry_after_s: float | None = None
        self._has_length = False
        self._has_head = False
        self._is_complete = True
        self._streams = False
        self._held_back = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_reusable = True

    async def exchange(self, request: bytes) -> Answer:
        self._send(request, streams=False)
        while not self._is_complete:
            await self._wait()
        return Answer(self._parser.get_status_code(), self._retry_after_s, b"".join(self._pieces))

    async def begin_stream(self, request: bytes) -> int:
        self._send(request, streams=True)
        while not self._has_head:
            await self._wait()
        return self._parser.get_status_code()

    async def next_piece(self) -> bytes | None:
        """None at the body's end."""
        while not self._pieces:
            if self._is_complete:
                return None
            await self._wait()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        if self._held_back and self._buffered < BUFFERED_BYTES // 2:
            self._held_back = False
            self._transport.resume_reading()
        return piece

    def abort(self) -> None:
        self.is_reusable = False
        self._transport.abort()

    def _send(self, request: bytes, *, streams: bool) -> None:
        if self._lost is not None:
            raise Broken(f"the server closed the connection: {self._lost}", was_sent=False)
        self._parser = httptools.HttpResponseParser(self)
        self._pieces.clear()
        self._retry_after_s = None
        self._has_length = self._has_head = self._is_complete = False
        self._streams = streams
        self._transport.write(request)

    async def _wait(self) -> None:
        if self._lost is not None:
            raise Broken(str(self._lost) or "the server closed the connection", was_sent=True) from self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        _notice_dead_peers(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            # Nobody asked: whatever this is, the next answer could not be told from it.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = Broken(f"the answer is not HTTP: {error}", was_sent=True)
            self.abort()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        # A body without a length ends with the connection; any other is cut short.
        if self._has_head and not self._has_length and exc is None:
            self._is_complete = True
        self._lost = self._lost or exc or ConnectionResetError("the server closed the connection")
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-length" | b"transfer-encoding":
                self._has_length = True
            case b"retry-after":
                with suppress(ValueError):
                    self._retry_after_s = float(value)

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if self._streams:
            self._buffered += len(piece)
            if self._buffered > BUFFERED_BYTES and not self._held_back:
                self._held_back = True
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._is_complete = True
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()


async def _connect(place: Place) -> Connection:
    server = urlsplit(place.server)
    host = server.hostname or ""
    port = server.port or (443 if place.tls else 80)
    name = (place.server_name or host) if place.tls else None
    loop = asyncio.get_running_loop()
    if not place.proxy:
        _, connection = await loop.create_connection(Connection, host, port, ssl=place.tls, server_hostname=name)
        return connection
    tunnel = await _tunnel(place.proxy, host, port)
    try:
        _, connection = await loop.create_connection(Connection, sock=tunnel, ssl=place.tls, server_hostname=name)
    except BaseException:
        tunnel.close()
        raise
    return connection


async def _tunnel(proxy: str, host: str, port: int) -> socket.socket:
    """A socket that an HTTP proxy has connected to the server."""
    loop = asyncio.get_running_loop()
    at = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    found = await loop.getaddrinfo(at.hostname, at.port or 3128, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    tunnel = socket.socket(family, kind, protocol)
    try:
        tunnel.setblocking(False)
        await loop.sock_connect(tunnel, address)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        await loop.sock_sendall(tunnel, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        reply = b""
        while b"\r\n\r\n" not in reply:
            part = await loop.sock_recv(tunnel, 4096)
            if not part or len(reply) > PROXY_REPLY_BYTES:
                raise Broken(f"the proxy {at.hostname} did not answer", was_sent=False)
            reply += part
        if reply.split(maxsplit=2)[1:2] != [b"200"]:
            said = reply.split(b"\r\n", 1)[0].decode(errors="replace")
            raise Broken(f"the proxy {at.hostname} refused: {said}", was_sent=False)
    except BaseException:
        tunnel.close()
        raise
    return tunnel


def _notice_dead_peers(connected: socket.socket | None) -> None:
    """A machine that is switched off sends no goodbye: probe after 15 quiet seconds, give up after 30 unanswered."""
    if connected is None or connected.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
