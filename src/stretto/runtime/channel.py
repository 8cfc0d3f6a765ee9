"""One WebSocket from a worker to its coordinator, kept open by a thread of its own.

The thread says hello, repeats the facts that may have been lost, beats, and hands what it hears to the member. When the
connection breaks it tries again until the lease is over: training goes on meanwhile. What is sent while there is no
connection is dropped unless it is one of the member's facts: everything else is only true for the moment.

A connection that has fallen silent may lead nowhere any more, or to a coordinator that is slow. So it is kept until
another one is welcomed: to the coordinator a connection that closes is a worker that died.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from pathlib import Path

from websockets.exceptions import InvalidHandshake, InvalidMessage, WebSocketException
from websockets.sync.client import ClientConnection, connect

from stretto.runtime.member import Evicted, JobFailed, Member
from stretto.runtime.messages import Bye, Evict, Message, MessageError, Welcome, decode, encode

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 1.0
_OPEN_S = 5.0
_SILENT_BEATS = 5
"""Every heartbeat is answered: after so many without a word another connection is tried."""
LEASE_OVER = "nothing was heard from the coordinator for the length of the lease"


class NoCoordinator(Exception):
    """There is no coordinator to talk to."""


class Channel:
    """Starts with `open`, which returns once the coordinator has answered."""

    def __init__(self, url: str, member: Member, notice: Path | None = None) -> None:
        """`notice`: a file that says where the coordinator is by now, if it has moved."""
        self.url, self.member, self._notice = url, member, notice
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connections: list[ClientConnection] = []
        """The last is in use; those before it have fallen silent."""
        self._retry_s = _FIRST_RETRY_S
        self._lock = threading.Lock()
        self._last: Bye | None = None
        self._said = threading.Event()
        self._reader = threading.Thread(target=self._read, name="stretto-channel", daemon=True)
        self._writer = threading.Thread(target=self._write, name="stretto-heartbeat", daemon=True)

    def open(self, timeout_s: float = 30.0) -> None:
        """Connect and say hello; raises `NoCoordinator`, or what the coordinator refuses it for."""
        self._first_s = time.monotonic() + timeout_s
        self._reader.start()
        if not self.member.wait(lambda: self.member.welcome is not None, timeout_s):
            self.close()
            raise NoCoordinator(f"no coordinator answers at {self.url} (waited {timeout_s:g} s)")
        self._writer.start()

    def send(self, message: Message) -> None:
        """Send soon; dropped if the connection is away and it is not one of the member's facts."""
        self._outbox.put(message)

    def close(self, last: Bye | None = None, timeout_s: float = 30.0) -> None:
        """Say the last word and hang up. While the coordinator is away the word waits for it, up to `timeout_s`."""
        if last is not None and self._writer.is_alive():
            self.member.state(last)
            self._last = last
            self._outbox.put(last)
            self._said.wait(timeout_s)
        self._closing.set()
        self._outbox.put(None)
        if self._writer.is_alive():
            self._writer.join(1.0)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(Exception):
                connection.close()

    def _read(self) -> None:
        while True:
            connection = None
            try:
                connection = self._greet()
                self._listen(connection)
            except InvalidMessage:
                # It hung up in the middle of the handshake: it may just have been killed.
                self._drop(connection)
            except InvalidHandshake as error:
                self.member.end(NoCoordinator(f"{self.url} does not answer as a coordinator: {error}"))
                return
            except (OSError, WebSocketException, MessageError):
                self._drop(connection)
            if self._closing.is_set() or isinstance(self.member.out, (Evicted, JobFailed)):
                self._said.set()
                return
            if self.member.welcome is None and time.monotonic() > self._first_s:
                return
            self._closing.wait(self._retry_s * random.uniform(0.5, 1.0))
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _greet(self) -> ClientConnection:
        """A new connection, on which everything that holds was said."""
        with contextlib.suppress(OSError):
            self.url = (self._notice.read_text().strip() if self._notice is not None else "") or self.url
        opened = connect(self.url, open_timeout=_OPEN_S, close_timeout=1.0, max_size=2**24, ping_interval=None)
        connection = contextlib.ExitStack().enter_context(opened)
        connection.send(encode(self.member.hello()))
        for fact in self.member.facts():
            connection.send(encode(fact))
            self._note(fact)
        with self._lock:
            self._connections.append(connection)
        return connection

    def _listen(self, connection: ClientConnection) -> None:
        """Returns when the coordinator has fallen silent, raises when the connection is closed."""
        while True:
            welcome = self.member.welcome
            try:
                message = decode(connection.recv(_SILENT_BEATS * welcome.heartbeat_s if welcome else _OPEN_S))
            except TimeoutError:
                return
            if isinstance(message, Welcome):
                self._retry_s = _FIRST_RETRY_S
                self._drop(*self._connections[:-1])
            self.member.hear(message)

    def _drop(self, *connections: ClientConnection | None) -> None:
        with self._lock:
            self._connections = [kept for kept in self._connections if kept not in connections]
        for connection in connections:
            if connection is not None:
                connection.close_socket()

    def _write(self) -> None:
        welcome = self.member.welcome
        assert welcome is not None
        beat_s = time.monotonic()
        while True:
            try:
                message = self._outbox.get(timeout=max(0.0, beat_s - time.monotonic()))
                if message is None:
                    return
            except queue.Empty:
                if self.member.lease_over(time.monotonic()):
                    self._stop()
                    return
                message = self.member.heartbeat()
                beat_s = time.monotonic() + welcome.heartbeat_s
            with self._lock:
                connection = self._connections[-1] if self._connections else None
            if connection is not None:
                with contextlib.suppress(OSError, WebSocketException):
                    connection.send(encode(message))
                    self._note(message)

    def _stop(self) -> None:
        """The lease is over. Whoever waits for a peer must not go on waiting."""
        self.member.end(Evicted(LEASE_OVER))
        for listener in self.member.listeners:
            listener(Evict(reason=LEASE_OVER))
        self._said.set()

    def _note(self, sent: Message) -> None:
        if sent is self._last:
            self._said.set()
