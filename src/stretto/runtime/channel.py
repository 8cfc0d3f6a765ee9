"""One WebSocket from a worker to its coordinator, kept open by a thread of its own.

The thread says hello, repeats the facts that may have been lost, beats, and hands what it hears to the member. When the
connection breaks it tries again until the lease is over: training goes on meanwhile. What is sent while there is no
connection is dropped unless it is one of the member's facts: everything else is only true for the moment.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time

from websockets.exceptions import InvalidHandshake, WebSocketException
from websockets.sync.client import ClientConnection, connect

from stretto.runtime.member import Evicted, JobFailed, Member
from stretto.runtime.messages import Bye, Message, MessageError, Welcome, decode, encode

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 1.0
_OPEN_S = 5.0
LEASE_OVER = "nothing was heard from the coordinator for the length of the lease"


class NoCoordinator(Exception):
    """There is no coordinator to talk to."""


class Channel:
    """Starts with `open`, which returns once the coordinator has answered."""

    def __init__(self, url: str, member: Member) -> None:
        self.url, self.member = url, member
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connection: ClientConnection | None = None
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
            connection = self._connection
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _read(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._closing.is_set():
            try:
                with connect(self.url, open_timeout=_OPEN_S, close_timeout=1.0, max_size=2**24) as connection:
                    connection.send(encode(self.member.hello()))
                    for fact in self.member.facts():
                        connection.send(encode(fact))
                        self._note(fact)
                    with self._lock:
                        self._connection = connection
                    for text in connection:
                        message = decode(text)
                        if isinstance(message, Welcome):
                            retry_s = _FIRST_RETRY_S
                        self.member.hear(message)
            except InvalidHandshake as error:
                self.member.end(NoCoordinator(f"{self.url} does not answer as a coordinator: {error}"))
                return
            except (OSError, WebSocketException, MessageError, TimeoutError):
                pass
            finally:
                with self._lock:
                    self._connection = None
            if self._closing.is_set() or isinstance(self.member.out, (Evicted, JobFailed)):
                self._said.set()
                return
            if self.member.lease_over(time.monotonic()):
                self.member.end(Evicted(LEASE_OVER))
                self._said.set()
                return
            if self.member.welcome is None and time.monotonic() > self._first_s:
                return
            self._closing.wait(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _LAST_RETRY_S)

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
                message = self.member.heartbeat()
                beat_s = time.monotonic() + welcome.heartbeat_s
            with self._lock:
                connection = self._connection
            if connection is not None:
                with contextlib.suppress(OSError, WebSocketException):
                    connection.send(encode(message))
                    self._note(message)

    def _note(self, sent: Message) -> None:
        if sent is self._last:
            self._said.set()
