"""A worker's rendezvous and its counter for state: against strangers, and against members that are mad."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.runtime.handshake import ANSWER_BYTES, Greeting, Secret
from stretto.torch.groups import Group, GroupBroken
from stretto.torch.rendezvous import LONGEST_LINE, Store, Visitor
from stretto.torch.transfer import Counter, Sending, Staging, receive

PATIENCE_S = 20.0
SECRET = "ours"


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    made = Store(secret=SECRET)
    yield made
    made.close()


def visitor(store: Store, generation: int = 7, secret: str = SECRET) -> Visitor:
    made = Visitor(store.address, generation, secret=secret)
    made.open(time.monotonic() + PATIENCE_S)
    return made


def knock(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, PATIENCE_S)


def prove(connection: socket.socket, role: str, generation: int = 7, secret: str = SECRET) -> None:
    greeting = Greeting(Secret(secret), role, generation)
    connection.sendall(greeting.said)
    connection.sendall(greeting.prove(connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)))


def works(store: Store) -> None:
    with contextlib.closing(visitor(store)) as one, contextlib.closing(visitor(store)) as other:
        one.put({"a": "1"})
        assert other.look(["a"]) == ["1"]


def gone(connection: socket.socket) -> bool:
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_another_jobs_worker_learns_and_changes_nothing(store: Store) -> None:
    with contextlib.closing(visitor(store)) as own:
        own.put({"key": "value"})
    with contextlib.closing(visitor(store, secret="theirs")) as stranger:
        with pytest.raises(ConnectionError):
            stranger.peek(["key"])
        with pytest.raises(ConnectionError):
            stranger.put({"key": "changed"})
    with contextlib.closing(visitor(store)) as own:
        assert own.peek(["key"]) == ["value"]


def test_a_guest_sees_the_generation_that_it_came_for(store: Store) -> None:
    with contextlib.closing(visitor(store, 8)) as eight, contextlib.closing(visitor(store, 9)) as nine:
        eight.put({"who": "eight"})
        assert eight.look(["who"]) == ["eight"]
        assert nine.peek(["who"]) == [None]


def test_a_false_leader_is_not_believed() -> None:
    with (
        contextlib.closing(Store(secret="theirs")) as false,
        contextlib.closing(visitor(false)) as own,
        pytest.raises(ConnectionError, match="secret"),
    ):
        own.put({"key": "value"})


MAD = [
    b"nonsense",
    b"\xff\xff",
    b"[]",
    b"7",
    b"{}",
    b'{"get": 7}',
    b'{"get": [1]}',
    b'{"get": ["a"], "unless": []}',
    b'{"put": []}',
    b'{"put": [["a", "b"]]}',
    b'{"put": {"a": 1}}',
    b'{"put": {"a": ' + b"[" * 100_000,
    b"[" * 100_000,
    b"9" * 10_000,
    b"1e999",
    b"x" * (LONGEST_LINE + 10),
]


@pytest.mark.parametrize("line", MAD, ids=range(len(MAD)))
def test_one_malformed_line_costs_its_own_connection(store: Store, line: bytes) -> None:
    host, _, port = store.address.rpartition(":")
    with knock((host, int(port))) as guest:
        prove(guest, "rendezvous")
        with contextlib.suppress(ConnectionError):
            guest.sendall(line + b"\n")
        assert gone(guest)
    works(store)


def test_who_reads_no_answers_holds_up_nobody(store: Store) -> None:
    host, _, port = store.address.rpartition(":")
    with contextlib.closing(visitor(store)) as own, knock((host, int(port))) as guest:
        own.put({"long": "x" * 500_000})
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        prove(guest, "rendezvous")
        ask = json.dumps({"get": ["long"] * 50}).encode() + b"\n"
        guest.sendall(ask * 20)
        works(store)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["get", "put", "unless", "now"]), inner)
    ),
    max_leaves=12,
)


def test_whatever_members_and_strangers_say_the_store_goes_on(store: Store) -> None:
    host, _, port = store.address.rpartition(":")

    @settings(max_examples=60)
    @given(
        st.lists(st.binary(max_size=60) | JUNK.map(lambda junk: json.dumps(junk).encode()), max_size=4), st.booleans()
    )
    def play(lines: list[bytes], proven: bool) -> None:
        with knock((host, int(port))) as guest:
            if proven:
                prove(guest, "rendezvous")
            with contextlib.suppress(ConnectionError):
                for line in lines:
                    guest.sendall(line + b"\n")

    play()
    works(store)


# The state on its way.


def group(generation: int = 7, secret: str = SECRET) -> Group:
    return Group(generation, 0, ["127.0.0.1:1", "127.0.0.1:2"], secret=secret)


def test_strangers_hold_up_no_transfer() -> None:
    """One says nothing, one says nonsense, one has another job's secret: the receiver gets the state all the same."""
    sender, receiver = group(), group()
    counter = Counter(sender, "127.0.0.1")
    assert SECRET not in str(counter.card)
    with contextlib.ExitStack() as stack:
        for said in (
            b"",
            b"\xff" * 200,
            Greeting(Secret("theirs"), "state", 7).said,
            Greeting(Secret(SECRET), "state", 8).said,
        ):
            stack.enter_context(knock(counter.card)).sendall(said)
        sending = Sending(sender, counter, 1, "{}", [torch.arange(5.0)], None)
        skeleton, (found,) = receive(receiver, counter.card, Staging(torch.device("cpu")))
        sending.wait()
    assert skeleton == "{}"
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    for one in (sender, receiver):
        one.close()


def test_nobody_gets_the_state_without_the_secret() -> None:
    sender, thief = group(), group(secret="theirs")
    counter = Counter(sender, "127.0.0.1")
    sending = Sending(sender, counter, 1, "{}", [torch.arange(5.0)], None)
    with pytest.raises(GroupBroken, match="secret"):
        receive(thief, counter.card, Staging(torch.device("cpu")))
    sender.abort("another generation was announced")
    with pytest.raises(GroupBroken):
        sending.wait()
    thief.close()


HEADS = st.binary(max_size=100) | st.fixed_dictionaries(
    {
        "skeleton": st.text(max_size=5) | JUNK,
        "tensors": JUNK | st.lists(st.tuples(JUNK, st.text(max_size=8) | st.just("float32")), max_size=3),
    }
).map(lambda head: json.dumps(head).encode())


@settings(max_examples=60)
@given(
    head=HEADS,
    promised=st.none() | st.integers(0, 2**64 - 1),
    small=st.integers(0, 2**64 - 1),
    rest=st.binary(max_size=50),
)
def test_whatever_a_sender_says_is_a_state_or_a_broken_group(
    head: bytes, promised: int | None, small: int, rest: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            from stretto.runtime.door import Door

            with contextlib.closing(Door(listener, Secret(SECRET), "state", 7)) as door:
                while not (admitted := door.come()):
                    time.sleep(0)
                with admitted[0].connection as connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE_S)
                    length = len(head) if promised is None else promised
                    connection.sendall(struct.pack("<QQ", length, small) + head + rest)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)

        serving = threading.Thread(target=serve)
        serving.start()
        own = group()
        with contextlib.suppress(GroupBroken):
            receive(own, listener.getsockname(), Staging(torch.device("cpu")))
        own.close()
        serving.join()
