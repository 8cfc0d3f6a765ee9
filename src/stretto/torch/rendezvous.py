"""Where the members of a generation leave their addresses for each other.

Every worker hosts a `Store`; the one of a generation's leader is used. It is a table of small values per generation,
on a thread of its own. The framework's own store is not used because its client cannot be stopped: it waits without
end when the host of the store is frozen, and starts again when its connection is shut down. A `Visitor` can be stopped
at any moment from any thread.

Who wants to come in proves that it belongs to the job, for one generation (`runtime/door.py`), and sees and changes
that generation's table only. Whatever is wrong with what a guest says costs it its connection, and nobody else
anything.

The wire after that: lines of JSON. `{"put": {key: value}}` has no answer; `{"get": [keys]}` is answered with the list
of values as soon as all of them are there, or, with `"unless": {key: value}`, as soon as one of those is there (what is
missing is null then); `"now": true` is answered at once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store as C10dStore

from stretto.runtime.door import Admitted, Door
from stretto.runtime.handshake import ANSWER_BYTES, Greeting, Secret

KEPT_GENERATIONS = 256
"""Tables of older ones are dropped."""
KEPT_BYTES = 1 << 26
"""Of all tables together; older ones go first, the newest stays."""
LARGEST_TABLE = 1 << 28

LONGEST_LINE = 1 << 20
_LONGEST_ANSWER = LARGEST_TABLE
ROLE = "rendezvous"


class Store:
    """The rendezvous that this worker hosts, on a free port of `host`, for those who know the job's secret."""

    def __init__(self, host: str = "127.0.0.1", secret: str = "") -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._door = Door(self._listener, Secret(secret), ROLE)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="stretto-rendezvous", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        # Processes that read data may hold copies of the socket: to close ours alone would wake nobody.
        self._wake.shutdown(socket.SHUT_RDWR)
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        tables = _Tables()
        with selectors.DefaultSelector() as ready, self._listener, self._woken, contextlib.closing(self._door):
            ready.register(self._door, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while True:
                found = ready.select(self._door.due_s())
                if any(key.fileobj is self._woken for key, _ in found):
                    break
                for key, events in found:
                    if key.data is not None and not key.data.turn(events, tables):
                        _part(ready, key.data)
                # Also when nobody has come: some have stood there for too long.
                for admitted in self._door.come():
                    guest = _Guest(admitted)
                    ready.register(guest.connection, selectors.EVENT_READ, guest)
                for guest in _guests(ready):
                    if not guest.answer(tables):
                        _part(ready, guest)
                    elif guest.events != ready.get_key(guest.connection).events:
                        ready.modify(guest.connection, guest.events, guest)
            for guest in _guests(ready):
                _part(ready, guest)


class _Tables:
    """What the members of each generation have put there."""

    def __init__(self) -> None:
        self._of: dict[int, dict[str, str]] = {}
        self._bytes: dict[int, int] = {}

    def of(self, generation: int) -> dict[str, str]:
        return self._of.get(generation, {})

    def put(self, generation: int, values: dict[str, str]) -> None:
        """Raises `ValueError` where that would be too much."""
        table = self._of.setdefault(generation, {})
        added = sum(len(key) + len(value) - len(table.get(key, "")) for key, value in values.items())
        size = self._bytes.get(generation, 0) + added
        if size > LARGEST_TABLE:
            raise ValueError("nobody has so much to say")
        table.update(values)
        self._bytes[generation] = size
        while len(self._of) > 1 and (len(self._of) > KEPT_GENERATIONS or sum(self._bytes.values()) > KEPT_BYTES):
            oldest = min(self._of)
            del self._of[oldest]
            self._bytes.pop(oldest, None)


class _Asked(NamedTuple):
    keys: list[str]
    unless: dict[str, str]
    now: bool


class _Guest:
    """One connection to the store, of somebody who has proved to belong to the job."""

    def __init__(self, admitted: Admitted) -> None:
        self.connection, self.generation = admitted
        self.asked: _Asked | None = None
        self._rest = b""
        self._answer = b""
        """What of the last answer is still to be sent; until then nothing more is taken in."""

    @property
    def events(self) -> int:
        return selectors.EVENT_WRITE if self._answer else selectors.EVENT_READ

    def turn(self, events: int, tables: _Tables) -> bool:
        """Take in what arrived; False when the guest has gone, or does not speak our language."""
        try:
            if events & selectors.EVENT_WRITE:
                self._send()
            return not events & selectors.EVENT_READ or self._read(tables)
        except Exception:
            # Whatever it was, it is this guest's, and everybody else goes on.
            return False

    def _read(self, tables: _Tables) -> bool:
        try:
            new = self.connection.recv(1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._take(json.loads(line), tables)
        return bool(new) and len(self._rest) < LONGEST_LINE

    def _take(self, said: dict[str, Any], tables: _Tables) -> None:
        if "get" in said:
            self.asked = _Asked(
                [_text(key) for key in said["get"]], _texts(said.get("unless", {})), bool(said.get("now"))
            )
        else:
            tables.put(self.generation, _texts(said["put"]))

    def answer(self, tables: _Tables) -> bool:
        """If what it waits for is there; False when it cannot be told."""
        if self.asked is None or self._answer:
            return True
        keys, unless, now = self.asked
        table = tables.of(self.generation)
        found = [table.get(key) for key in keys]
        if now or None not in found or any(table.get(key) == value for key, value in unless.items()):
            self.asked = None
            self._answer = json.dumps(found).encode() + b"\n"
            try:
                self._send()
            except OSError:
                return False
        return True

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._answer = self._answer[self.connection.send(self._answer) :]


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError("keys and values are text")
    return given


def _texts(given: dict[object, object]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in given.items()}


def _guests(ready: selectors.BaseSelector) -> list[_Guest]:
    return [key.data for key in ready.get_map().values() if key.data is not None]


def _part(ready: selectors.BaseSelector, guest: _Guest) -> None:
    ready.unregister(guest.connection)
    guest.connection.close()


def unreachable(addresses: Sequence[str], within_s: float) -> list[str]:
    """Of these stores, those to which there is no way, or that are gone. A frozen one is there: its kernel answers."""
    deadline = time.monotonic() + within_s
    with contextlib.ExitStack() as closing, selectors.DefaultSelector() as ready:
        knocking = {address: closing.enter_context(_knock(address)) for address in addresses}
        for knock in knocking.values():
            ready.register(knock, selectors.EVENT_WRITE)
        while ready.get_map() and (found := ready.select(max(0.0, deadline - time.monotonic()))):
            for key, _ in found:
                ready.unregister(key.fileobj)
        return [address for address, knock in knocking.items() if not _answered(knock)]


def _knock(address: str) -> socket.socket:
    """Begin to connect."""
    family, kind, proto, _, resolved = _resolve(address)
    knock = socket.socket(family, kind, proto)
    knock.setblocking(False)
    knock.connect_ex(resolved)
    return knock


def _answered(knock: socket.socket) -> bool:
    try:
        knock.getpeername()
    except OSError:
        return False
    return True


def _resolve(address: str) -> tuple[Any, ...]:
    host, _, port = address.rpartition(":")
    return socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]


class Visitor(C10dStore):
    """One generation's table in somebody's store, as the framework wants to see it. Errors are `OSError`."""

    def __init__(self, address: str, generation: int, prefix: str = "", secret: str = "") -> None:
        """`prefix` is put before the keys of the framework."""
        super().__init__()
        self._address = address
        self._greeting: Greeting | None = Greeting(Secret(secret), ROLE, generation)
        """Until the store has proved itself, and we to it."""
        self._prefix = prefix
        self._socket: socket.socket | None = None
        self._answers: Any = None
        self._stopped = False
        self._lock = threading.Lock()
        self.deadline = 0.0

    def open(self, deadline: float) -> None:
        """Come in. Everything that is asked later has to be answered by the deadline (monotonic) too."""
        assert self._greeting is not None
        self.deadline = deadline
        family, kind, proto, _, address = _resolve(self._address)
        # Known before it is connected: so that `stop` ends that too.
        self._socket = socket.socket(family, kind, proto)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        if not self._stopped:
            self._socket.connect(address)
        self._answers = self._socket.makefile("rb")
        # The answer is waited for when there is something to say: until then it is on its way.
        self._socket.sendall(self._greeting.said)

    def stop(self) -> None:
        """Whoever waits here gets an `OSError` now."""
        self._stopped = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop()
        if self._socket is not None:
            self._socket.close()
        if self._answers is not None:
            self._answers.close()

    def put(self, values: dict[str, str]) -> None:
        with self._lock:
            self._say({"put": values})

    def look(self, keys: Sequence[str]) -> list[str]:
        """The values, once all are there."""
        return [str(value) for value in self._ask(keys, {})]

    def look_unless(
        self, keys: Sequence[str], unless: dict[str, str], look_up: Callable[[], None], every_s: float
    ) -> list[str | None]:
        """As `look`, but it waits no longer once one of the other keys has the value named. While it waits it calls
        `look_up` now and then; what that raises ends the wait, and this visitor with it."""
        with self._lock:
            self._say({"get": list(keys), "unless": unless})
            assert self._socket is not None
            there = select.poll()
            there.register(self._socket, select.POLLIN)
            while not there.poll(1000 * every_s):
                look_up()
            return self._answer(len(keys))

    def peek(self, keys: Sequence[str]) -> list[str | None]:
        """What is there of them now."""
        return self._ask(keys, {"now": True})

    def _ask(self, keys: Sequence[str], more: dict[str, Any]) -> list[str | None]:
        with self._lock:
            self._say({"get": list(keys), **more})
            return self._answer(len(keys))

    def _answer(self, count: int) -> list[str | None]:
        line = self._answers.readline(_LONGEST_ANSWER)
        if not line:
            raise ConnectionError("the leader's store has closed the connection")
        try:
            found: list[str | None] = json.loads(line)
        except (ValueError, RecursionError):
            found = []
        if not isinstance(found, list) or len(found) != count:
            raise ConnectionError("the leader's store does not speak our language")
        return found

    def _say(self, said: dict[str, Any]) -> None:
        if self._socket is None or self._stopped:
            raise ConnectionError("stopped")
        self._socket.settimeout(max(0.001, self.deadline - time.monotonic()))
        self._socket.sendall(self._proof() + json.dumps(said).encode() + b"\n")

    def _proof(self) -> bytes:
        """What goes before the first thing that is said."""
        if self._greeting is None:
            return b""
        answer = self._answers.read(ANSWER_BYTES)
        if len(answer) < ANSWER_BYTES:
            raise ConnectionError("the leader's store has closed the connection")
        proof = self._greeting.prove(answer)
        self._greeting = None
        return proof

    # What the framework calls.

    def set(self, key: str, value: Any) -> None:
        told = base64.b64encode(value if isinstance(value, bytes) else str(value).encode()).decode()
        self.put({self._prefix + key: told})

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [base64.b64decode(value) for value in self.look([self._prefix + key for key in keys])]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.look([self._prefix + key for key in keys])
