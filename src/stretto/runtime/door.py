"""A listening socket at which guests prove that they belong to the job before anybody else hears of them.

Whoever says nothing, says something else, says it too slowly or goes away costs its own connection: a hundred bytes
are read of it, for a few seconds, and only so many stand at the door at a time. When it is full the one that has stood
there longest makes room, but for the first moment, which everybody has; meanwhile others wait in the kernel's queue.

A door has one descriptor for all of them, to be waited for with whatever else its owner waits for.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from stretto.runtime.handshake import GREETING_BYTES, PROOF_BYTES, Reception, Secret, Stranger

MOST_UNPROVEN = 256
PROVE_S = 5.0
"""So long a guest may take to prove itself."""
MOMENT_S = 0.5
"""So long nobody is sent away to make room."""
_AT_ONCE = 64
_PAUSE_S = 0.1
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_NOT_OURS = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})
"""What `accept` says of a socket that does not listen any more. All else is a guest's own trouble."""


class Admitted(NamedTuple):
    """A guest that has proved itself; its socket does not block."""

    connection: socket.socket
    generation: int


class _Guest:
    def __init__(self, connection: socket.socket, reception: Reception, came_s: float) -> None:
        self.connection, self.reception, self.came_s = connection, reception, came_s
        self.said = b""
        self.answered = False


class Door:
    def __init__(
        self,
        listener: socket.socket,
        secret: Secret,
        role: str,
        generation: int | None = None,
        *,
        most: int = MOST_UNPROVEN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`listener` stays the caller's. `generation`: the only one that guests may come for."""
        listener.setblocking(False)
        self._listener, self._secret, self._role, self._generation = listener, secret, role, generation
        self._most, self._clock = most, clock
        self._guests: dict[int, _Guest] = {}
        """By descriptor; who came first is first."""
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._shut_until_s = 0.0
        """Nobody is let in until then; 0: the door is open."""

    def fileno(self) -> int:
        """Readable when `come` has something to do."""
        return self._selector.fileno()

    def due_s(self) -> float | None:
        """In so many seconds `come` has something to do though nothing happens; None: never."""
        times = [self._shut_until_s] if self._shut_until_s else []
        if self._guests:
            times.append(self._oldest().came_s + PROVE_S)
        return max(0.0, min(times) - self._clock()) if times else None

    def come(self) -> list[Admitted]:
        """Do what there is to do; who has proved itself. Raises `OSError` if the listener does not listen any more."""
        now_s = self._clock()
        while self._guests and now_s >= self._oldest().came_s + PROVE_S:
            self._turn_away(self._oldest())
        if self._shut_until_s and now_s >= self._shut_until_s:
            self._open()
        admitted = []
        for key, _ in self._selector.select(0):
            guest: _Guest | None = key.data
            if guest is None:
                self._let_in(now_s)
            elif self._guests.get(key.fd) is guest and (found := self._hear(guest)) is not None:
                admitted.append(found)
        return admitted

    def close(self) -> None:
        """Turn everybody away who has not proved itself."""
        for guest in list(self._guests.values()):
            self._turn_away(guest)
        self._selector.close()

    def _oldest(self) -> _Guest:
        return next(iter(self._guests.values()))

    def _open(self) -> None:
        self._shut_until_s = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ)

    def _shut(self, until_s: float) -> None:
        self._shut_until_s = until_s
        self._selector.unregister(self._listener)

    def _let_in(self, now_s: float) -> None:
        for _ in range(_AT_ONCE):
            full = len(self._guests) >= self._most
            if full and now_s < self._oldest().came_s + MOMENT_S:
                self._shut(self._oldest().came_s + MOMENT_S)
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NOT_OURS:
                    raise
                if error.errno in _NO_ROOM:
                    if self._guests:
                        self._turn_away(self._oldest())
                    self._shut(now_s + _PAUSE_S)
                return
            if full:
                self._turn_away(self._oldest())
            connection.setblocking(False)
            guest = _Guest(connection, Reception(self._secret, self._role, self._generation), now_s)
            self._guests[connection.fileno()] = guest
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _hear(self, guest: _Guest) -> Admitted | None:
        """Never more is read than belongs to the proof: what follows is for whoever has the connection then."""
        try:
            while True:
                missing = (PROOF_BYTES if guest.answered else GREETING_BYTES) - len(guest.said)
                new = guest.connection.recv(missing)
                if not new:
                    raise Stranger("it has gone")
                guest.said += new
                if len(new) < missing:
                    return None
                if guest.answered:
                    break
                guest.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                guest.connection.sendall(guest.reception.answer(guest.said))
                guest.answered, guest.said = True, b""
            if not guest.reception.admits(guest.said):
                raise Stranger("it does not know the secret")
        except BlockingIOError:
            return None
        except OSError:
            self._turn_away(guest)
            return None
        self._forget(guest)
        return Admitted(guest.connection, guest.reception.generation)

    def _turn_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.connection.close()

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest.connection.fileno()]
        self._selector.unregister(guest.connection)
