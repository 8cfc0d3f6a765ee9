"""The socket that workers join by, from those who are none: bytes on the wire, before anything is proven."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_client import PATIENCE_S, Api, serving
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT, BINARY, CLOSE, PING = 0x1, 0x2, 0x8, 0x9


def frame(kind: int, payload: bytes, *, last: bool = True, length: int | None = None) -> bytes:
    """As a client sends it, with a mask of zeros; `length` is what it says of itself."""
    said = len(payload) if length is None else length
    if said < 126:
        size = bytes([0x80 | said])
    elif said < 1 << 16:
        size = bytes([0x80 | 126]) + struct.pack(">H", said)
    else:
        size = bytes([0x80 | 127]) + struct.pack(">Q", said)
    return bytes([(0x80 if last else 0) | kind]) + size + bytes(4) + payload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Api]:
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def job(server: Api) -> str:
    """One that lives as long as the server."""
    made = server.submit("sleep 600", elastic={"min": 1, "max": 2})
    server.until(made["id"], "running")
    return str(made["id"])


@contextlib.contextmanager
def joining(server: Api, job: str) -> Iterator[socket.socket]:
    host, _, port = server.address.rpartition(":")
    key = base64.b64encode(os.urandom(16)).decode()
    head = f"GET /v1/jobs/{job}/join HTTP/1.1\r\nHost: {server.address}\r\nUpgrade: websocket\r\n"
    head += f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(head.encode())
        said = b""
        while b"challenge" not in said:
            more = connection.recv(4096)
            assert more, said
            said += more
        yield connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            said += more
    return said


WRONG = {
    "no message": (frame(TEXT, b"nonsense"), 1008),
    "bytes": (frame(BINARY, b"{}"), 1008),
    "no text": (frame(TEXT, b"\xff\xfe"), 1007),
    "too long": (frame(TEXT, b"x" * 5000), 1009),
    "said to be too long": (frame(TEXT, b"x", length=1 << 24), 1009),
    "too long in pieces": (frame(TEXT, b"x" * 3000, last=False) + frame(0, b"x" * 3000), 1009),
    "endless pieces": (frame(TEXT, b"", last=False) + frame(0, b"", last=False) * 100, 1009),
    "no frame": (b"\x7f" * 100, 1002),
    "too deep": (frame(TEXT, b"[" * 4000), 1008),
    "a message of others": (
        frame(TEXT, b'{"kind": "heartbeat", "generation": 1, "loop": 0, "step": 1, "applied": 1}'),
        1008,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_closes_the_connection_and_leaves_no_traceback(
    server: Api, job: str, name: str, folder: Path
) -> None:
    said, code = WRONG[name]
    with joining(server, job) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(said)
        told = rest(connection)
    assert struct.pack(">H", code) in told
    assert "Traceback" not in "".join(path.read_text() for path in folder.glob("*.log"))
    assert server.get("/healthz").status == 200


def is_hung_up_on(connection: socket.socket, said: bytes) -> bool:
    with contextlib.suppress(ConnectionError):
        for _ in range(10_000):
            connection.sendall(said)
        return False
    return True


def test_pings_whose_answers_nobody_reads_are_hung_up_on(server: Api, job: str) -> None:
    pings = frame(PING, b"x" * 125) * 500
    with joining(server, job) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        assert is_hung_up_on(connection, pings)
    assert server.get("/healthz").status == 200


def test_whatever_bytes_come(server: Api, job: str, folder: Path) -> None:
    frames = st.builds(frame, st.integers(0, 15), st.binary(max_size=130), last=st.booleans())

    @settings(max_examples=30)
    @given(st.lists(frames | st.binary(max_size=40), max_size=6))
    def play(parts: list[bytes]) -> None:
        with joining(server, job) as connection:
            with contextlib.suppress(OSError):
                for part in parts:
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
            rest(connection)

    play()
    assert "Traceback" not in "".join(path.read_text() for path in folder.glob("*.log"))
    assert server.get("/healthz").status == 200
