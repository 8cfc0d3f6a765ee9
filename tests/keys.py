"""Keys and certificates made with `openssl`, and somebody who shows one of them in another's place."""

from __future__ import annotations

import hashlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed; as root: apt-get install openssl"
)
EC = ("ec", "ec_paramgen_curve:P-256")
RSA = ("rsa", "rsa_keygen_bits:2048")
ED25519 = ("ed25519", "")


class Pair(NamedTuple):
    certificate: Path
    key: Path

    @property
    def pin(self) -> str:
        """As openssl sees it, and none of our code."""
        return key_seen_in(self.der)

    @property
    def der(self) -> bytes:
        return ssl.PEM_cert_to_DER_cert(self.certificate.read_text())


def key_seen_in(der: bytes) -> str:
    """By openssl; empty if it sees none."""
    try:
        public = _openssl("x509", "-inform", "DER", "-noout", "-pubkey", given=der)
        raw = _openssl("pkey", "-pubin", "-outform", "DER", given=public)
    except subprocess.CalledProcessError:
        return ""
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def make(
    folder: Path, name: str, kind: tuple[str, str] = EC, *, days: int = 30, key: Path | None = None,
    subject: str = "/CN=server", more: Sequence[str] = (),
) -> Pair:  # fmt: skip
    """A self-signed certificate, for a new key if none is given."""
    folder.mkdir(exist_ok=True)
    if key is None:
        key = folder / f"{name}.key"
        option = ["-pkeyopt", kind[1]] if kind[1] else []
        _openssl("genpkey", "-algorithm", kind[0], *option, "-out", str(key))
    certificate = folder / f"{name}.crt"
    _openssl(
        "req", "-x509", "-new", "-key", str(key), "-days", str(days), "-subj", subject, *more, "-out", str(certificate)
    )
    return Pair(certificate, key)


def _openssl(*words: str, given: bytes = b"") -> bytes:
    return subprocess.run(["openssl", *words], input=given, capture_output=True, check=True, timeout=60).stdout


class Impostor(NamedTuple):
    port: int
    heard: list[bytes]
    """What was said to it inside of TLS."""
    met: threading.Semaphore
    """A handshake more is over, however it went."""


@contextmanager
def impostor(pair: Pair, port: int = 0) -> Iterator[Impostor]:
    """Shows its key to whoever comes, writes down what it is told first, and hangs up."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    heard: list[bytes] = []
    met = threading.Semaphore(0)
    with socket.create_server(("127.0.0.1", port)) as listening:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listening.accept()
                except OSError:
                    return
                plain.settimeout(60)
                with suppress(OSError), plain, context.wrap_socket(plain, server_side=True) as connection:
                    if said := connection.recv(65536):
                        heard.append(said)
                met.release()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield Impostor(listening.getsockname()[1], heard, met)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(60)
