"""Guests at the door: who knows the secret comes in, and nobody else costs anybody anything."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.runtime.door import MOMENT_S, PROVE_S, Admitted, Door
from stretto.runtime.handshake import ANSWER_BYTES, Greeting, Reception, Secret, Stranger

PATIENCE_S = 20.0
SECRET = Secret("ours")


class Doorstep:
    """A door with a clock that a test turns, and the guests before it."""

    def __init__(self, generation: int | None = None, most: int = 256) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.now_s = 0.0
        self.door = Door(self.listener, SECRET, "state", generation, most=most, clock=lambda: self.now_s)
        self.guests: list[socket.socket] = []
        self.admitted: list[Admitted] = []

    def guest(self, said: bytes = b"") -> socket.socket:
        guest = socket.create_connection(self.listener.getsockname(), PATIENCE_S)
        self.guests.append(guest)
        guest.sendall(said)
        return guest

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "it does not happen"
            select.select([self.door], [], [], 0.05)
            self.admitted += self.door.come()

    def prove(self, guest: socket.socket, greeting: Greeting, rest: bytes = b"") -> None:
        guest.sendall(greeting.said)
        self.until(lambda: readable(guest))
        guest.sendall(greeting.prove(exactly(guest, ANSWER_BYTES)) + rest)

    def close(self) -> None:
        self.door.close()
        for one in (self.listener, *self.guests, *(admitted.connection for admitted in self.admitted)):
            one.close()


@pytest.fixture
def doorstep() -> Iterator[Doorstep]:
    with contextlib.closing(Doorstep()) as made:
        yield made


def readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def exactly(connection: socket.socket, count: int) -> bytes:
    return connection.recv(count, socket.MSG_WAITALL)


def gone(connection: socket.socket) -> bool:
    """Whether the other end has hung up."""
    try:
        return readable(connection) and not connection.recv(1000)
    except ConnectionResetError:
        return True


def test_who_knows_the_secret_comes_in_and_what_it_says_next_is_not_touched(doorstep: Doorstep) -> None:
    guest = doorstep.guest()
    doorstep.prove(guest, Greeting(SECRET, "state", 7), b"and now")
    doorstep.until(lambda: bool(doorstep.admitted))
    (found,) = doorstep.admitted
    assert found.generation == 7
    assert exactly(found.connection, 7) == b"and now"
    assert doorstep.door.due_s() is None


def test_the_secret_is_never_said(doorstep: Doorstep) -> None:
    wire = bytearray()
    guest, greeting = doorstep.guest(), Greeting(SECRET, "state", 7)
    guest.sendall(greeting.said)
    doorstep.until(lambda: readable(guest))
    answer = exactly(guest, ANSWER_BYTES)
    wire += greeting.said + answer + greeting.prove(answer)
    assert b"ours" not in wire


@pytest.mark.parametrize(
    ("secret", "role", "generation"), [("theirs", "state", 7), ("ours", "rendezvous", 7), ("ours", "state", 8)]
)
def test_another_job_role_or_generation_is_turned_away(secret: str, role: str, generation: int) -> None:
    with contextlib.closing(Doorstep(generation=7)) as doorstep:
        guest = doorstep.guest()
        greeting = Greeting(Secret(secret), role, generation)
        guest.sendall(greeting.said)
        doorstep.until(lambda: readable(guest))
        with contextlib.suppress(Stranger, ConnectionResetError):
            # Neither believes the other.
            answer = exactly(guest, ANSWER_BYTES)
            if answer:
                greeting.prove(answer)
                raise AssertionError("the guest took the host for its own")
        if secret == "theirs":
            guest.sendall(bytes(32))
        doorstep.until(lambda: gone(guest))
        assert not doorstep.admitted


def test_a_host_that_does_not_know_the_secret_is_told_nothing() -> None:
    greeting = Greeting(SECRET, "state", 7)
    with pytest.raises(Stranger):
        greeting.prove(Reception(Secret("theirs"), "state").answer(greeting.said))


def test_what_was_overheard_is_of_no_use_a_second_time(doorstep: Doorstep) -> None:
    greeting = Greeting(SECRET, "state", 7)
    first = doorstep.guest()
    first.sendall(greeting.said)
    doorstep.until(lambda: readable(first))
    overheard = greeting.prove(exactly(first, ANSWER_BYTES))
    first.sendall(overheard)
    doorstep.until(lambda: len(doorstep.admitted) == 1)
    second = doorstep.guest(greeting.said + overheard)
    doorstep.until(lambda: gone(second))
    assert len(doorstep.admitted) == 1


def test_nor_is_what_the_host_says_sent_back_to_it(doorstep: Doorstep) -> None:
    guest = doorstep.guest(Greeting(SECRET, "state", 7).said)
    doorstep.until(lambda: readable(guest))
    guest.sendall(exactly(guest, ANSWER_BYTES)[-32:])
    doorstep.until(lambda: gone(guest))
    assert not doorstep.admitted


def test_who_says_nothing_or_too_little_is_sent_away_and_holds_up_nobody(doorstep: Doorstep) -> None:
    slow = [doorstep.guest(), doorstep.guest(b"stretto2"), doorstep.guest(Greeting(SECRET, "state", 7).said)]
    doorstep.until(lambda: readable(slow[2]))
    doorstep.prove(doorstep.guest(), Greeting(SECRET, "state", 7))
    doorstep.until(lambda: len(doorstep.admitted) == 1)
    assert not any(gone(one) for one in slow[:2])
    doorstep.now_s += PROVE_S
    assert doorstep.door.due_s() == 0.0
    exactly(slow[2], ANSWER_BYTES)
    doorstep.until(lambda: all(gone(one) for one in slow))


def test_where_it_is_full_who_stood_there_longest_makes_room() -> None:
    with contextlib.closing(Doorstep(most=4)) as doorstep:
        first = [doorstep.guest() for _ in range(4)]
        late = doorstep.guest(Greeting(SECRET, "state", 7).said)
        doorstep.until(lambda: doorstep.door.due_s() == MOMENT_S)
        assert not readable(late), "everybody has a moment"
        doorstep.now_s += MOMENT_S
        doorstep.until(lambda: readable(late))
        assert [gone(one) for one in first] == [True, False, False, False]


def test_nobody_is_let_in_while_there_are_no_descriptors(doorstep: Doorstep) -> None:
    guest = doorstep.guest(Greeting(SECRET, "state", 7).said)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    # Every number below is taken.
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(guest.fileno()))
        assert doorstep.door.come() == []
        assert doorstep.door.due_s() is not None, "it looks again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for one in fillers:
            os.close(one)
    doorstep.now_s += 1.0
    doorstep.until(lambda: readable(guest))


def test_a_listener_that_is_shut_down_ends_it(doorstep: Doorstep) -> None:
    doorstep.listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(OSError) as found:
        doorstep.until(lambda: False)
    assert found.value.errno == errno.EINVAL


@settings(max_examples=40)
@given(said=st.lists(st.binary(max_size=200), max_size=4), proper=st.booleans(), leaves=st.booleans())
def test_whatever_guests_say_the_door_stays_open(said: list[bytes], proper: bool, leaves: bool) -> None:
    with contextlib.closing(Doorstep(generation=7)) as doorstep:
        greeting = Greeting(SECRET, "state", 7).said if proper else b""
        stranger = doorstep.guest(greeting)
        with contextlib.suppress(ConnectionError):
            for part in said:
                stranger.sendall(part)
        if leaves:
            stranger.close()
            doorstep.guests.remove(stranger)
        doorstep.prove(doorstep.guest(), Greeting(SECRET, "state", 7))
        doorstep.until(lambda: bool(doorstep.admitted))
        assert len(doorstep.admitted) == 1
