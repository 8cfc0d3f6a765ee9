"""Where the members of a generation leave their addresses for each other.

Every worker hosts a `Store`; the one of a generation's leader is used. It is a table of small values per generation,
on a thread of its own. The framework's own store is not used because its client cannot be stopped: it waits without
end when the host of the store is frozen, and starts again when its connection is shut down. A `Visitor` can be stopped
at any moment from any thread.

The wire: lines of JSON. `{"generation", "put": {key: value}}` has no answer; `{"generation", "get": [keys]}` is
answered with the list of values as soon as all of them are there, or, with `"unless": {key: value}`, as soon as one of
those is there (what is missing is null then); `"now": true` is answered at once.
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

KEPT_GENERATIONS = 256
"""Tables of older ones are dropped."""

LONGEST_LINE = 1 << 20


class Store:
    """The rendezvous that this worker hosts, on a free port of `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
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
        tables: dict[int, dict[str, str]] = {}
        with selectors.DefaultSelector() as ready, self._listener, self._woken:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj is self._woken:
                        _close_guests(ready)
                        return
                    if key.fileobj is self._listener:
                        _accept(self._listener, ready)
                    elif not key.data.read(tables):
                        ready.unregister(key.fileobj)
                        key.data.close()
                _answer(ready, tables)


class _Asked(NamedTuple):
    generation: int
    keys: list[str]
    unless: dict[str, str]
    now: bool


class _Guest:
    """One connection to the store."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.asked: _Asked | None = None
        self._rest = b""

    def read(self, tables: dict[int, dict[str, str]]) -> bool:
        """Take in what arrived; False when the guest has gone, or does not speak our language."""
        try:
            new = self.connection.recv(1 << 16)
            *lines, self._rest = (self._rest + new).split(b"\n")
            for line in lines:
                self._take(json.loads(line), tables)
        except BlockingIOError:
            return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return bool(new) and len(self._rest) < LONGEST_LINE

    def _take(self, said: dict[str, Any], tables: dict[int, dict[str, str]]) -> None:
        generation = int(said["generation"])
        if "get" in said:
            unless = {str(key): str(value) for key, value in said.get("unless", {}).items()}
            self.asked = _Asked(generation, [str(key) for key in said["get"]], unless, bool(said.get("now")))
            return
        tables.setdefault(generation, {}).update(said["put"])
        for old in sorted(tables)[:-KEPT_GENERATIONS]:
            del tables[old]

    def answer(self, tables: dict[int, dict[str, str]]) -> None:
        if self.asked is None:
            return
        generation, keys, unless, now = self.asked
        table = tables.get(generation, {})
        found = [table.get(key) for key in keys]
        if now or None not in found or any(table.get(key) == value for key, value in unless.items()):
            self.asked = None
            # Answers are small and asked for one at a time: they fit into the socket's buffer.
            with contextlib.suppress(OSError):
                self.connection.sendall(json.dumps(found).encode() + b"\n")

    def close(self) -> None:
        self.connection.close()


def _accept(listener: socket.socket, ready: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ready.register(connection, selectors.EVENT_READ, _Guest(connection))


def _guests(ready: selectors.BaseSelector) -> list[_Guest]:
    return [key.data for key in ready.get_map().values() if key.data is not None]


def _answer(ready: selectors.BaseSelector, tables: dict[int, dict[str, str]]) -> None:
    for guest in _guests(ready):
        guest.answer(tables)


def _close_guests(ready: selectors.BaseSelector) -> None:
    for guest in _guests(ready):
        guest.close()


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

    def __init__(self, address: str, generation: int, prefix: str = "") -> None:
        """`prefix` is put before the keys of the framework."""
        super().__init__()
        self._address = address
        self._generation = generation
        self._prefix = prefix
        self._socket: socket.socket | None = None
        self._answers: Any = None
        self._stopped = False
        self._lock = threading.Lock()
        self.deadline = 0.0

    def open(self, deadline: float) -> None:
        """Come in. Everything that is asked later has to be answered by the deadline (monotonic) too."""
        self.deadline = deadline
        family, kind, proto, _, address = _resolve(self._address)
        # Known before it is connected: so that `stop` ends that too.
        self._socket = socket.socket(family, kind, proto)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        if not self._stopped:
            self._socket.connect(address)
        self._answers = self._socket.makefile("rb")

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
            self._say({"generation": self._generation, "put": values})

    def look(self, keys: Sequence[str]) -> list[str]:
        """The values, once all are there."""
        return [str(value) for value in self._ask({"get": list(keys)})]

    def look_unless(
        self, keys: Sequence[str], unless: dict[str, str], look_up: Callable[[], None], every_s: float
    ) -> list[str | None]:
        """As `look`, but it waits no longer once one of the other keys has the value named. While it waits it calls
        `look_up` now and then; what that raises ends the wait, and this visitor with it."""
        with self._lock:
            self._say({"generation": self._generation, "get": list(keys), "unless": unless})
            assert self._socket is not None
            there = select.poll()
            there.register(self._socket, select.POLLIN)
            while not there.poll(1000 * every_s):
                look_up()
            return self._answer()

    def peek(self, keys: Sequence[str]) -> list[str | None]:
        """What is there of them now."""
        return self._ask({"get": list(keys), "now": True})

    def _ask(self, asked: dict[str, Any]) -> list[str | None]:
        with self._lock:
            self._say({"generation": self._generation, **asked})
            return self._answer()

    def _answer(self) -> list[str | None]:
        line = self._answers.readline()
        if not line:
            raise ConnectionError("the leader's store has closed the connection")
        found: list[str | None] = json.loads(line)
        return found

    def _say(self, said: dict[str, Any]) -> None:
        if self._socket is None or self._stopped:
            raise ConnectionError("stopped")
        self._socket.settimeout(max(0.001, self.deadline - time.monotonic()))
        self._socket.sendall(json.dumps(said).encode() + b"\n")

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
