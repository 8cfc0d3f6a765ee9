"""A key is read out of a certificate as openssl reads it, and nobody with another key is told anything."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from keys import EC, ED25519, RSA, Pair, impostor, key_seen_in, make, needs_openssl
from stretto import pins

pytestmark = needs_openssl
REFUSED = r"certificate|end"
LONG = "".join(f"/{name}={name * 30}" for name in ("O", "OU", "CN", "L"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory.mktemp("keys"), "server")


@pytest.mark.parametrize("kind", [EC, RSA, ED25519], ids=["ec", "rsa", "ed25519"])
@pytest.mark.parametrize("subject", ["/CN=x", LONG])
def test_the_key_of_a_certificate(tmp_path: Path, kind: tuple[str, str], subject: str) -> None:
    made = make(tmp_path, "server", kind, subject=subject, more=["-addext", "subjectAltName=DNS:a.example,IP:10.0.0.1"])
    assert pins.of_certificate(made.der) == made.pin
    assert pins.of_file("text before\n" + made.certificate.read_text() * 2) == made.pin


def test_a_certificate_of_the_first_version(tmp_path: Path) -> None:
    """It has no version in it, so that all that follows stands one place earlier."""
    bare = tmp_path / "bare.cnf"
    bare.write_text("[req]\ndistinguished_name=dn\n[dn]\n")
    made = make(tmp_path, "server", more=["-config", str(bare)])
    versioned = make(tmp_path, "other", key=made.key)
    version = bytes.fromhex("a003020102")
    assert version not in made.der
    assert version in versioned.der
    assert pins.of_certificate(made.der) == pins.of_certificate(versioned.der) == made.pin


def test_a_renewed_certificate_has_the_same_pin(tmp_path: Path) -> None:
    first = make(tmp_path, "first")
    renewed = make(tmp_path, "second", key=first.key, days=90, subject="/CN=renamed")
    assert first.der != renewed.der
    assert pins.of_certificate(first.der) == pins.of_certificate(renewed.der)
    assert pins.of_certificate(make(tmp_path, "third").der) != first.pin


@settings(max_examples=60)
@given(data=st.data())
def test_a_spoiled_certificate_gives_nobody_the_pin(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut: refused. With bytes changed: refused, or another pin, or openssl sees the very same key in it."""
    der = bytearray(pair.der)
    with pytest.raises(ValueError, match=REFUSED):
        pins.of_certificate(bytes(der[: data.draw(st.integers(0, len(der) - 1))]))
    for _ in range(data.draw(st.integers(1, 3))):
        der[data.draw(st.integers(0, len(der) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = pins.of_certificate(bytes(der))
    except ValueError:
        return
    assert (found == pair.pin) == (key_seen_in(bytes(der)) == pair.pin) or not key_seen_in(bytes(der))


@pytest.mark.parametrize(
    "der",
    [b"", b"\x30", b"\x30\x80\x00\x00", b"\x30\x81\x05abcde", b"\x30\x82\x00\x85" + b"x" * 200,
     b"\x30\x85\x01\x01\x01\x01\x01", b"\x31\x03abc", b"\x30\x84\xff\xff\xff\xff"],
)  # fmt: skip
def test_other_ways_to_write_lengths_are_refused(der: bytes) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        pins.of_certificate(der)


@pytest.mark.parametrize(
    "text", ["", "sha256:", "sha256:" + "g" * 64, "sha256:" + "a" * 63, "md5:" + "a" * 64, "a" * 64]
)
def test_what_is_no_pin(text: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        pins.checked(text)
    assert pins.checked(f" SHA256:{'AB' * 32}\n") == f"sha256:{'ab' * 32}"


def test_a_certificate_with_other_lengths_is_refused(pair: Pair) -> None:
    """As BER allows them, and with them several readings."""
    der = pair.der
    assert der[:2] == b"\x30\x82"
    for longer in (b"\x30\x83\x00" + der[2:], b"\x30\x84\x00\x00" + der[2:], b"\x30\x80" + der[4:] + b"\x00\x00"):
        with pytest.raises(ValueError, match=REFUSED):
            pins.of_certificate(longer)


def test_addresses_with_a_pin() -> None:
    assert pins.below("ws://h:1", "/x") == "ws://h:1/x"
    assert pins.below("wss://h:1#sha256:ab", "/x") == "wss://h:1/x#sha256:ab"
    assert pins.parted("wss://h:1/x#sha256:ab") == ("wss://h:1/x", "sha256:ab")


# Three ways to connect.


def _plainly(port: int, context: ssl.SSLContext) -> None:
    with socket.create_connection(("127.0.0.1", port), 60) as plain, context.wrap_socket(plain) as connection:
        connection.sendall(b"secret")


def _in_a_loop(new: Callable[[], asyncio.AbstractEventLoop]) -> Callable[[int, ssl.SSLContext], None]:
    async def connect(port: int, context: ssl.SSLContext) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="")
        writer.write(b"secret")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    def run(port: int, context: ssl.SSLContext) -> None:
        with asyncio.Runner(loop_factory=new) as runner:
            runner.run(connect(port, context))

    return run


WAYS = [_plainly, _in_a_loop(asyncio.new_event_loop), _in_a_loop(uvloop.new_event_loop)]


@pytest.mark.parametrize("connect", WAYS, ids=["plain", "asyncio", "uvloop"])
def test_only_the_pinned_key_is_talked_to(
    tmp_path: Path, pair: Pair, connect: Callable[[int, ssl.SSLContext], None]
) -> None:
    other = make(tmp_path, "other")
    with impostor(pair) as right:
        connect(right.port, pins.context(pair.pin))
        assert right.met.acquire(timeout=60)
        assert b"".join(right.heard) == b"secret"
    with impostor(other) as wrong:
        with pytest.raises(ssl.SSLError) as refused:
            connect(wrong.port, pins.context(pair.pin))
        assert wrong.met.acquire(timeout=60)
        assert not wrong.heard, "nothing was said to it"
    found = pins.other_key(refused.value)
    assert found is not None
    assert (found.pinned, found.found) == (pair.pin, other.pin)


def test_without_a_pin_authorities_decide(pair: Pair) -> None:
    with impostor(pair) as alone:
        with pytest.raises(ssl.SSLCertVerificationError):
            _plainly_named(alone.port)
        assert not alone.heard
        assert pins.shown_by("127.0.0.1", alone.port, 60) == pair.pin
        assert not pins.is_vouched_for("127.0.0.1", alone.port, 60)


def _plainly_named(port: int) -> None:
    with closing(socket.create_connection(("127.0.0.1", port), 60)) as plain:
        pins.context().wrap_socket(plain, server_hostname="127.0.0.1").close()
