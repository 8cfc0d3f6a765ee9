"""The worker's end of the wire, against a coordinator that falls silent."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from keys import impostor, make, needs_openssl
from stretto.runtime.channel import LEASE_OVER, Channel, NoCoordinator
from stretto.runtime.handshake import Secret
from stretto.runtime.introduction import challenge, welcomed
from stretto.runtime.member import Evicted, Member
from stretto.runtime.messages import Evict, Heartbeat, Hello, Message, Proof, Ready, Welcome, decode, encode

PATIENCE_S = 20.0


@contextmanager
def silence(lease_s: float) -> Iterator[tuple[Member, SimpleQueue[ServerConnection]]]:
    """A member whose coordinator greets its first connection and then says nothing; all connections, as they come."""
    came: SimpleQueue[ServerConnection] = SimpleQueue()
    over = threading.Event()

    def hold(connection: ServerConnection) -> None:
        came.put(connection)
        over.wait()

    server = serve(hold, "127.0.0.1", 0)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    member = Member("w", "i", "secret", "h:1")
    channel = Channel(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", member)
    opening = threading.Thread(target=channel.open)
    opening.start()
    first = came.get(timeout=PATIENCE_S)
    prove(first)
    first.send(encode(Welcome(generation=0, loops_done=0, heartbeat_s=0.02, lease_s=lease_s)))
    opening.join()
    came.put(first)
    try:
        yield member, came
    finally:
        over.set()
        channel.close()
        server.shutdown()
        serving.join()


def again(came: SimpleQueue[ServerConnection]) -> ServerConnection:
    """The next connection, whose host proves itself and says nothing more."""
    connection = came.get(timeout=PATIENCE_S)
    prove(connection)
    assert said(connection) == Ready(), "what holds is said again"
    return connection


def prove(connection: ServerConnection) -> None:
    """As a coordinator of the job."""
    connection.send(encode(given := challenge()))
    hello = said(connection)
    assert isinstance(hello, Hello)
    proof = welcomed(hello, given, Secret("secret"))
    assert proof is not None
    connection.send(encode(proof))


def said(connection: ServerConnection) -> Message:
    return decode(connection.recv(timeout=PATIENCE_S))


def until_closed(connection: ServerConnection) -> Iterator[Message]:
    with suppress(ConnectionClosed):
        while True:
            yield said(connection)


def test_a_silent_connection_is_kept_until_another_is_welcomed() -> None:
    with silence(lease_s=PATIENCE_S) as (member, came):
        first = came.get(timeout=PATIENCE_S)
        member.state(Ready())
        second, third = again(came), again(came)
        for other in (first, second):
            other.send(b"still there?")
        third.send(encode(Welcome(generation=0, loops_done=0, heartbeat_s=PATIENCE_S, lease_s=PATIENCE_S)))
        for other in (first, second):
            assert all(isinstance(message, Heartbeat) for message in until_closed(other))
        third.send(encode(Evict(reason="enough")))
        with pytest.raises(Evicted, match="enough"):
            member.wait(lambda: False, PATIENCE_S)


def test_the_end_of_the_lease_is_told_to_whoever_waits_for_a_peer() -> None:
    heard: SimpleQueue[Message] = SimpleQueue()
    with silence(lease_s=0.2) as (member, _):
        member.listeners.append(heard.put)
        assert heard.get(timeout=PATIENCE_S) == Evict(reason=LEASE_OVER)
        with pytest.raises(Evicted, match=LEASE_OVER):
            member.wait(lambda: False, PATIENCE_S)


def test_a_host_without_the_secret_is_told_nothing_and_not_believed() -> None:
    heard: SimpleQueue[str] = SimpleQueue()

    came = threading.Event()

    def pretend(connection: ServerConnection) -> None:
        """To the first that comes; it comes again, and is not heard."""
        if came.is_set():
            return
        came.set()
        given = challenge()
        connection.send(encode(given))
        heard.put(str(connection.recv(timeout=PATIENCE_S)))
        with suppress(ConnectionClosed):
            connection.send(encode(Proof(proof=given.nonce)))
            connection.send(encode(Welcome(generation=0, loops_done=0, heartbeat_s=1.0, lease_s=60.0)))
            heard.put(str(connection.recv(timeout=PATIENCE_S)))
        heard.put("it hung up")

    server = serve(pretend, "127.0.0.1", 0)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    member = Member("w", "i", "a-secret", "h:1")
    member.state(Ready())
    channel = Channel(f"ws://127.0.0.1:{server.socket.getsockname()[1]}", member)

    def open_channel() -> None:
        with suppress(NoCoordinator):
            channel.open(1.0)

    opening = threading.Thread(target=open_channel)
    opening.start()
    said = heard.get(timeout=PATIENCE_S)
    assert isinstance(decode(said), Hello)
    assert "a-secret" not in said
    assert heard.get(timeout=PATIENCE_S) == "it hung up"
    assert member.welcome is None
    opening.join()
    server.shutdown()
    serving.join()


def test_a_server_that_answers_in_another_way_is_no_end_for_who_was_welcome() -> None:
    """The next server at that port may speak TLS already, and the notice that says so may come a moment later."""
    refusing, refused, came = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)

    def look(connection: ServerConnection, request: Request) -> Response | None:
        if not refusing.is_set():
            return None
        refused.release()
        return connection.respond(400, "this port speaks TLS")

    def greet(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            prove(connection)
            connection.send(encode(Welcome(generation=0, loops_done=0, heartbeat_s=60.0, lease_s=600.0)))
            came.release()
            while not refusing.is_set():
                connection.recv()

    with answering(greet, process_request=look) as port:
        member = Member("w", "i", "secret", "h:1")
        channel = Channel(f"ws://127.0.0.1:{port}", member)
        channel.open(PATIENCE_S)
        assert came.acquire(timeout=PATIENCE_S)
        refusing.set()
        channel.send(Ready())
        for _ in range(2):
            assert refused.acquire(timeout=PATIENCE_S), "it comes again"
        assert member.out is None
        refusing.clear()
        assert came.acquire(timeout=PATIENCE_S)
        channel.close()


@contextmanager
def answering(greet: Callable[[ServerConnection], None], **how: Any) -> Iterator[int]:
    """Its port."""
    server = serve(greet, "127.0.0.1", 0, **how)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield server.socket.getsockname()[1]
    finally:
        server.shutdown()
        serving.join()


@needs_openssl
def test_who_has_another_key_is_told_nothing(tmp_path: Path) -> None:
    """Nor is it taken for the coordinator's last word: the worker looks for it until its time is over."""
    right, wrong = make(tmp_path, "right"), make(tmp_path, "wrong")
    with impostor(wrong) as met:
        url = f"wss://127.0.0.1:{met.port}/v1/jobs/1/join"
        for wait_s in (1.0, 10.0, 100.0):
            channel = Channel(f"{url}#{right.pin}", Member("w", "i", "a-secret", "h:1"))
            with pytest.raises(NoCoordinator) as refused:
                channel.open(wait_s)
            if met.met.acquire(blocking=False):
                break
        assert not met.heard
        assert f"answers at {url} (" in str(refused.value)
        assert f"it has another key: {wrong.pin} instead of {right.pin}" in str(refused.value)


@needs_openssl
def test_the_key_moves_with_the_coordinator(tmp_path: Path) -> None:
    """The notice says where it is by now, and by which key it is known."""
    old, new = make(tmp_path, "old"), make(tmp_path, "new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(new.certificate, new.key)
    notice = tmp_path / "coordinator"

    def greet(connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            prove(connection)
            connection.send(encode(Welcome(generation=0, loops_done=0, heartbeat_s=1.0, lease_s=60.0)))
            connection.recv()

    with answering(greet, ssl=context) as port:
        url = f"wss://127.0.0.1:{port}"
        notice.write_text(f"{url}#{new.pin}")
        member = Member("w", "i", "secret", "h:1")
        channel = Channel(f"{url}#{old.pin}", member, notice)
        channel.open(PATIENCE_S)
        assert member.welcome is not None
        channel.close()
