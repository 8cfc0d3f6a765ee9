"""One WebSocket from a worker to its coordinator, kept open by a thread of its own.

The thread answers the coordinator's challenge with its hello, and once the coordinator has proved itself repeats the
facts that may have been lost, beats, and hands what it hears to the member. A host that does not know the job's secret
is told nothing but the hello, and not believed; only a worker that was never welcomed takes its refusal for an answer.

When the connection breaks it tries again until the lease is over: training goes on meanwhile. What is sent while there
is no connection is dropped unless it is one of the member's facts: everything else is only true for the moment.

Where the coordinator's address carries a pin, nobody with another key is told even the hello: to a worker that is as if
nobody had answered.

A connection that has fallen silent may lead nowhere any more, or to a coordinator that is slow. So it is kept until
another one is welcomed: to the coordinator a connection that closes is a worker that died.
"""

from __future__ import annotations

import contextlib
import queue
import random
import ssl
import threading
import time
from pathlib import Path

from websockets.exceptions import InvalidHandshake, InvalidMessage, WebSocketException
from websockets.sync.client import ClientConnection, connect

from stretto import pins
from stretto.runtime import bounds, introduction
from stretto.runtime.handshake import Secret
from stretto.runtime.member import Evicted, JobFailed, Member
from stretto.runtime.messages import (
    LONGEST_TOLD,
    LONGEST_UNPROVEN,
    Bye,
    Challenge,
    Evict,
    Hello,
    Message,
    MessageError,
    Proof,
    Welcome,
    decode,
    encode,
    encode_bounded,
)

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
        """`url`, with a pin behind a # if there is TLS. `notice`: a file that says where the coordinator is by now, if
        it has moved, in the same way."""
        self.url, self.member, self._notice = url, member, notice
        self._trouble = ""
        """Why nobody was talked to, where it is not that nobody answers."""
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._connections: list[ClientConnection] = []
        """The last is the newest; those before it have fallen silent."""
        self._current: ClientConnection | None = None
        """The one to speak on: its host has proved itself, and has not fallen silent."""
        self._secret = Secret(member.token)
        self._retry_s = _FIRST_RETRY_S
        self._trusted: tuple[str, ssl.SSLContext] | None = None
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
            trouble = f": {self._trouble}" if self._trouble else ""
            raise NoCoordinator(
                f"no coordinator answers at {pins.parted(self.url)[0]} (waited {timeout_s:g} s){trouble}"
            )
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
                connection, hello, challenge = self._greet()
                self._listen(connection, hello, challenge)
            except InvalidMessage:
                # It hung up in the middle of the handshake: it may just have been killed.
                self._drop(connection)
            except InvalidHandshake as error:
                if self.member.welcome is None:
                    address = pins.parted(self.url)[0]
                    self.member.end(NoCoordinator(f"{address} does not answer as a coordinator: {error}"))
                    return
                # It was there, and may be again: the next server may speak TLS where the last one did not.
                self._drop(connection)
            except (OSError, WebSocketException, MessageError, ValueError) as error:
                self._trouble = str(error.args[-1]) if isinstance(error, (ssl.SSLError, ValueError)) else ""
                self._drop(connection)
            if self._closing.is_set() or isinstance(self.member.out, (Evicted, JobFailed)):
                self._said.set()
                return
            if self.member.welcome is None and time.monotonic() > self._first_s:
                return
            self._closing.wait(self._retry_s * random.uniform(0.5, 1.0))
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _greet(self) -> tuple[ClientConnection, Hello, Challenge]:
        """A new connection, on which its challenge was answered with a hello."""
        with contextlib.suppress(OSError):
            self.url = (self._notice.read_text().strip() if self._notice is not None else "") or self.url
        address, pin = pins.parted(self.url)
        opened = connect(
            address, ssl=self._context(pin) if address.startswith("wss:") else None,
            open_timeout=_OPEN_S, close_timeout=1.0, max_size=LONGEST_UNPROVEN, ping_interval=None,
        )  # fmt: skip
        connection = contextlib.ExitStack().enter_context(opened)
        try:
            message = decode(connection.recv(_OPEN_S))
            if not isinstance(message, Challenge):
                raise MessageError("a coordinator begins with a challenge")
            hello = introduction.introduced(self.member.hello(), message, self._secret)
            connection.send(encode(hello))
        except BaseException:
            # Nobody knows of it yet.
            connection.close_socket()
            raise
        with self._lock:
            self._connections.append(connection)
        return connection, hello, message

    def _context(self, pin: str) -> ssl.SSLContext:
        """Made once: without a pin all authorities are read for it."""
        if self._trusted is None or self._trusted[0] != pin:
            self._trusted = pin, pins.context(pin)
        return self._trusted[1]

    def _listen(self, connection: ClientConnection, hello: Hello, challenge: Challenge) -> None:
        """Returns when the coordinator has fallen silent, raises when the connection is closed, or leads elsewhere."""
        proven = False
        while True:
            welcome = self.member.welcome
            try:
                message = decode(
                    connection.recv(_SILENT_BEATS * welcome.heartbeat_s if welcome and proven else _OPEN_S)
                )
            except TimeoutError:
                with self._lock:
                    self._current = None
                return
            if not proven:
                proven = self._is_proof(message, hello, challenge)
                if proven:
                    self._begin(connection)
                continue
            if isinstance(message, Welcome):
                self._retry_s = _FIRST_RETRY_S
                self._drop(*self._connections[:-1])
            self.member.hear(message)

    def _is_proof(self, message: Message, hello: Hello, challenge: Challenge) -> bool:
        """Whether the host has proved itself. Raises `MessageError` if it says anything else."""
        if isinstance(message, Evict) and self.member.welcome is None:
            self.member.hear(message)
            return False
        if isinstance(message, Proof) and introduction.believed(message, hello, challenge, self._secret):
            return True
        raise MessageError("who answers does not know the secret of the job")

    def _begin(self, connection: ClientConnection) -> None:
        """The host has proved itself: say everything that holds."""
        bounds.widen(connection.protocol, LONGEST_TOLD)
        said = self._repeat(connection, [])
        with self._lock:
            self._current = connection
        # What has come true meanwhile may have been dropped.
        self._repeat(connection, said)

    def _repeat(self, connection: ClientConnection, said: list[Message]) -> list[Message]:
        facts = self.member.facts()
        for fact in facts:
            if fact not in said:
                connection.send(encode_bounded(fact))
                self._note(fact)
        return facts

    def _drop(self, *connections: ClientConnection | None) -> None:
        with self._lock:
            self._connections = [kept for kept in self._connections if kept not in connections]
            if self._current in connections:
                self._current = None
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
                connection = self._current
            if connection is not None:
                with contextlib.suppress(OSError, WebSocketException):
                    connection.send(encode_bounded(message))
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
