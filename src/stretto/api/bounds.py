"""How long a client may take, how much it may send before it is answered, and how many may be connected.

- A request's head has so many bytes and seconds (431, 408); so has a body between two parts of it, and as a whole
  (408). Whoever does not read what is sent is hung up on.
- There may be so many connections, and fewer from one address that is not this machine. One more takes the place of the
  one that has waited longest without a whole request, be it half a head or none; when all are being answered, it is
  answered with 503. So half-open requests lock nobody out.
- What goes on for long, WebSockets (workers among them) and streams, is counted apart, and may be more. Of those a user
  may have so many (429), so that nobody takes them from the others.

An endless head is not told to us by the parser, therefore its bytes are counted here.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
from collections import Counter
from typing import Any

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from stretto.api.local import PEER, peer_of
from stretto.errors import TooMany, Unavailable

_HEADERS_TOO_LARGE = b"431 Request Header Fields Too Large"
_TOO_SLOW = b"408 Request Timeout"
_TOO_MANY = b"503 Service Unavailable"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    header_bytes: int = 2**16
    header_s: float = 10.0
    part_s: float = 20.0
    """Between two parts of a body."""
    body_s: float = 120.0
    write_s: float = 30.0
    """So long nothing of what is sent may be taken."""
    connections: int = 4096
    """Without those that are streams."""
    per_address: int = 256
    streams: int = 8192
    streams_per_user: int = 256
    handshakes: int = 512
    """Connections to a port with TLS that have not shown yet that they speak it; each has `header_s`."""

    @classmethod
    def here(cls) -> Limits:
        """As many as this process may have open, with some left for its other work."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        usual = cls()
        streams = min(usual.streams, most * 3 // 8)
        return cls(
            connections=min(usual.connections, most // 2),
            streams=streams,
            streams_per_user=min(usual.streams_per_user, streams // 8),
            handshakes=min(usual.handshakes, most // 16),
        )


def begin_stream(scope: Scope, user: str = "") -> None:
    """This request's answer, or this WebSocket, goes on for long; for that user, if there is one. Raises `TooMany` and
    `Unavailable`."""
    connection = scope.get("state", {}).get(_SCOPE)
    if isinstance(connection, Bounded):
        connection.becomes_stream(user)


_SCOPE = "stretto.connection"


class Connected:
    """All connections of one server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.idle: dict[Bounded, None] = {}
        """Those without a whole request, the one that has waited longest first."""
        self.plain: Counter[str] = Counter()
        self.streams = 0
        self.of_users: Counter[str] = Counter()
        """Streams, and WebSockets that are no workers'."""

    def room_for(self, newcomer: Bounded) -> bool:
        """Whether it may stay; somebody who only waits may have to go for it."""
        address = newcomer.address
        if address and self.plain[address] >= self.limits.per_address:
            return self._give_up(address)
        return self.plain.total() < self.limits.connections or self._give_up("")

    def _give_up(self, address: str) -> bool:
        """Hang up on the one that has waited longest, of that address if it is given."""
        for waiting in self.idle:
            if not address or waiting.address == address:
                waiting.give_up()
                return True
        return False


def protocol(limits: Limits) -> type[HttpToolsProtocol]:
    """What uvicorn makes one of for every connection."""
    connected = Connected(limits)

    class Ours(Bounded):
        all = connected

    return Ours


class Bounded(HttpToolsProtocol):
    all: Connected
    address = ""
    """Whose connections are counted together; empty for this machine's, where everybody has the same one."""
    _in_head = True
    _begun = False
    """Whether there is anything of the head."""
    _head_bytes = _counted = 0
    _is_plain = _is_stream = False
    _user = ""
    """Whose stream it is."""
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _body_until_s = 0.0

    # Its life.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (uid := peer_of(transport)) is not None:
            self.app_state = {**self.app_state, PEER: uid}
        self.address = counted_as(self.client[0] if self.client else "")
        if not self.all.room_for(self):
            self._say(_TOO_MANY, b"retry-after: 1\r\n")
            return
        self._count_plain()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """Room is needed. Its place is free at once."""
        self._forget()
        if self._begun:
            self._say(_TOO_SLOW)
        self.transport.close()

    def _forget(self) -> None:
        self._stop("_head_timer", "_body_timer", "_write_timer")
        self.all.idle.pop(self, None)
        if self._is_plain:
            self._is_plain = False
            self.all.plain[self.address] -= 1
            if not self.all.plain[self.address]:
                del self.all.plain[self.address]
        if self._is_stream:
            self._is_stream = False
            self.all.streams -= 1
        if self._user:
            self.all.of_users[self._user] -= 1
            if not self.all.of_users[self._user]:
                del self.all.of_users[self._user]
            self._user = ""

    # Its requests.

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None and not self._answering:
                self._wait_for_head()
        elif self._body_timer is not None:
            self._wait_for_part()
        super().data_received(data)
        # A header that has no end yet is not told to us.
        if self._in_head and self._head_bytes > self.all.limits.header_bytes and not self.transport.is_closing():
            self._counted = self._head_bytes
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun, self._counted = True, 0
        self.scope["state"][_SCOPE] = self

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._begun, self._in_head, self._head_bytes = False, False, 0
        self._stop("_head_timer")
        self.all.idle.pop(self, None)
        self._body_until_s = self.loop.time() + self.all.limits.body_s
        self._wait_for_part()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._stop("_body_timer")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._is_stream:
            self._forget()
            self._count_plain()
        if self._in_head and not self._answering:
            # Until its next request begins uvicorn's own time of keeping connections counts.
            self.all.idle[self] = None
            if self._begun:
                self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        if self._counted > self.all.limits.header_bytes:
            self._say(_HEADERS_TOO_LARGE)
        else:
            super().send_400_response(msg)

    def handle_websocket_upgrade(self) -> None:
        """From here on another protocol has the connection. It tells us when it ends, so that it can be counted."""
        self._forget()
        if self.all.streams >= self.all.limits.streams:
            self._say(_TOO_MANY, b"retry-after: 10\r\n")
            return
        self.app_state = {**self.app_state, _SCOPE: self}
        super().handle_websocket_upgrade()
        taken_over = self.transport.get_protocol()
        if taken_over is self or self.transport.is_closing():
            return
        self._is_stream = True
        self.all.streams += 1
        lost = taken_over.connection_lost

        def connection_lost(exc: Exception | None) -> None:
            self._forget()
            lost(exc)

        taken_over.connection_lost = connection_lost  # type: ignore[method-assign]

    def becomes_stream(self, user: str) -> None:
        """A response that goes on for long begins, or a WebSocket is somebody's."""
        most = self.all.limits.streams_per_user
        if user and self.all.of_users[user] >= most:
            raise TooMany(
                f"{user} has {most} streams open, which is as many as one may have",
                hint="end some: followed logs and events, `stretto run` and waiting clients each have one or two",
            )
        if not self._is_stream:
            if self.all.streams >= self.all.limits.streams:
                raise Unavailable("there are too many streams", hint="end some of yours, or try again later")
            self._forget()
            self._is_stream = True
            self.all.streams += 1
        if user:
            self._user = user
            self.all.of_users[user] += 1

    # What it does not take.

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.all.limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop("_write_timer")
        super().resume_writing()

    # Helpers.

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_plain(self) -> None:
        self._is_plain = True
        self.all.plain[self.address] += 1

    def _wait_for_head(self) -> None:
        self.all.idle[self] = None
        self._head_timer = self.loop.call_later(self.all.limits.header_s, self._too_slow)

    def _wait_for_part(self) -> None:
        self._stop("_body_timer")
        within_s = min(self.all.limits.part_s, self._body_until_s - self.loop.time())
        self._body_timer = self.loop.call_later(max(0.0, within_s), self._too_slow)

    def _too_slow(self) -> None:
        """Whoever has sent nothing at all gets no answer; whoever is being answered already gets no second one."""
        self._stop("_head_timer", "_body_timer")
        if self.transport.is_closing():
            return
        if not self._in_head and self.flow.read_paused:
            # It is we who do not take it.
            self._body_timer = self.loop.call_later(self.all.limits.part_s, self._too_slow)
            return
        answering = not self._in_head and self.cycle is not None and self.cycle.response_started
        if answering or (self._in_head and not self._begun):
            self.transport.close()
        else:
            self._say(_TOO_SLOW)

    def _say(self, status: bytes, headers: bytes = b"") -> None:
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\n" + headers + b"content-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _stop(self, *timers: str) -> None:
        for name in timers:
            timer = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    def _count(self, size: int) -> None:
        self._counted += size
        if self._counted > self.all.limits.header_bytes:
            raise ValueError("headers without end")


def counted_as(host: str) -> str:
    try:
        found: Any = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return "" if found.is_loopback else str(found)
