"""The key and the certificate that a server shows: given ones, or its own.

    DATA/tls.key   made once, by `openssl`, and kept (0600): clients know the server by it
    DATA/tls.crt   says who made it: the key itself; made anew, for the same key, when it is about to expire

Nobody has to sign it: who connects pins the key (`stretto.pins`). The names in it are for programs that pin nothing and
are told to trust this certificate (`curl --cacert`).
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from stretto import jobfiles, pins
from stretto.errors import MissingExtra, UsageError

_DAYS = 3650
_RENEWED_BEFORE_S = 30 * 86400
_OPENSSL_S = 60
_LARGEST = 1 << 20
# All that is in the certificate, whatever the machine's own configuration of openssl says.
_WANTED = """
[req]
prompt = no
distinguished_name = name
x509_extensions = more
[name]
CN = stretto
[more]
subjectAltName = {names}
subjectKeyIdentifier = hash
basicConstraints = critical, CA:TRUE
keyUsage = critical, digitalSignature, keyCertSign
extendedKeyUsage = serverAuth
"""


class Tls(msgspec.Struct, frozen=True):
    certificate: str
    """A file, with those of the authorities between it and the root behind it, if there are any."""
    key: str
    pin: str


def given(certificate: Path, key: Path) -> Tls:
    """Files of somebody else's making; they are read again at every start."""
    try:
        return checked(certificate.resolve(), key.resolve())
    except Unfit as error:
        raise UsageError(
            f"--tls-cert {certificate} and --tls-key {key}: {error}",
            hint="give a certificate and its key, both PEM, the key without a passphrase",
        ) from None


def made(data: Path, names: Iterable[str] = ()) -> Tls:
    """The server's own, in its data directory; made if they are not there."""
    certificate, key = data / "tls.crt", data / "tls.key"
    with tempfile.TemporaryDirectory(prefix=".tls-", dir=data) as folder:
        if not key.exists():
            fresh = Path(folder, "key")
            _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(fresh))
            jobfiles.write(key, jobfiles.read(fresh, _LARGEST), mode=0o600, durable=True)
        jobfiles.tighten(key, 0o600, root=data)
        if not _is_good(certificate, key):
            fresh, wanted = Path(folder, "crt"), Path(folder, "wanted")
            jobfiles.write(wanted, _WANTED.format(names=",".join(_alternatives(names))).encode())
            _openssl(
                "req", "-x509", "-new", "-config", str(wanted), "-key", str(key), "-sha256", "-days", str(_DAYS),
                "-out", str(fresh),
            )  # fmt: skip
            jobfiles.write(certificate, jobfiles.read(fresh, _LARGEST), mode=0o600, durable=True)
    try:
        return checked(certificate, key)
    except Unfit as error:
        raise UsageError(
            f"{certificate} and {key} cannot be used: {error}",
            hint="remove both, and the server makes new ones; who has pinned the key must then log in again",
        ) from None


class Unfit(Exception):
    """They are not a certificate and its key."""


def checked(certificate: Path, key: Path) -> Tls:
    """Whether they belong together, before anybody is promised anything."""
    try:
        jobfiles.read(key, _LARGEST)
        pin = pins.of_file(jobfiles.read(certificate, _LARGEST).decode())
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        raise Unfit(f"they do not fit together ({error.reason or error})") from None
    except (OSError, ValueError) as error:
        raise Unfit(str(error)) from None
    return Tls(str(certificate), str(key), pin)


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _is_good(certificate: Path, key: Path) -> bool:
    """Whether it is there, of this key, and will be good for a while."""
    try:
        checked(certificate, key)
    except Unfit:
        return False
    asked = ("x509", "-in", str(certificate), "-noout", "-checkend", str(_RENEWED_BEFORE_S))
    return _run(asked).returncode == 0


def _alternatives(names: Iterable[str]) -> list[str]:
    own = socket.gethostname().lower()
    known = dict.fromkeys(["localhost", own, own.partition(".")[0], *names, "127.0.0.1", "::1"])
    return [f"IP:{name}" if _is_number(name) else f"DNS:{name}" for name in known if name]


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _openssl(*arguments: str) -> None:
    done = _run(arguments)
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise UsageError(
            f"`openssl {arguments[0]}` has failed: {told[-1] if told else done.returncode}",
            hint="make a key and a certificate in another way, and give them with --tls-cert and --tls-key",
        )


def _run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    program = shutil.which("openssl")
    if program is None:
        raise MissingExtra(
            "a certificate is made with the program `openssl`, which is not here",
            hint="install it, or give --tls-cert and --tls-key",
        )
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=_OPENSSL_S, stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
