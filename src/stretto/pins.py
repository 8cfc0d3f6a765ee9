"""A server's key, pinned: whom a client or a worker talks to is known by the key, whoever signed it or nobody.

A pin is `sha256:` and the SHA-256 of the key as it stands in a certificate (its SubjectPublicKeyInfo), in 64 digits. A
certificate that is renewed for the same key keeps the pin. Whoever connects with a pin asks for nothing else: no
authority, no name, no date; TLS itself makes sure that the other end has the key. Without a pin the authorities that
this machine trusts decide, as usual.

The check happens in the handshake, before anything of ours is sent. An address may carry its pin: `wss://HOST:PORT#PIN`.

Workers load this: the standard library only.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl

_PIN = re.compile(r"sha256:[0-9a-f]{64}")
_INTEGER, _SEQUENCE, _VERSION = 0x02, 0x30, 0xA0


class OtherKey(ssl.SSLCertVerificationError):
    """The other end has another key than the one that is pinned."""

    def __init__(self, pinned: str, found: str) -> None:
        super().__init__(1, f"it has another key: {found} instead of {pinned}")
        self.pinned, self.found = pinned, found


def checked(text: str) -> str:
    """A pin as people hand it on. Raises `ValueError`."""
    pin = text.strip().lower()
    if not _PIN.fullmatch(pin):
        raise ValueError(f"{text!r} is not the fingerprint of a key: sha256: and 64 digits")
    return pin


def context(pin: str = "") -> ssl.SSLContext:
    """For a client. It believes whoever has that key, or without a pin whom the authorities of this machine vouch
    for."""
    if not pin:
        return ssl.create_default_context()
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.sslsocket_class, made.sslobject_class = _classes(checked(pin))
    return made


def nobody() -> ssl.SSLContext:
    """Believes nobody at all: for a client that speaks plain HTTP. It costs next to nothing."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def of_certificate(der: bytes) -> str:
    """The pin of the key in a certificate. Raises `ValueError` for what is none."""
    return f"sha256:{hashlib.sha256(_key_in(der)).hexdigest()}"


def of_file(pem: str) -> str:
    """The pin of the first certificate in a PEM text, which is the server's own. Raises `ValueError`."""
    found = re.search(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", pem, re.DOTALL)
    if found is None:
        raise ValueError("there is no certificate in it")
    return of_certificate(ssl.PEM_cert_to_DER_cert(found.group()))


def shown_by(host: str, port: int, timeout_s: float) -> str:
    """The pin of whoever answers there, whom nobody has checked yet. Raises `OSError`."""
    asking = nobody()
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((host, port), timeout_s) as plain,
        asking.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return _pin_of(connection.getpeercert(binary_form=True))


def is_vouched_for(host: str, port: int, timeout_s: float) -> bool:
    """Whether an authority that this machine trusts does. Raises `OSError` if nobody answers."""
    try:
        with (
            socket.create_connection((host, port), timeout_s) as plain,
            context().wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLCertVerificationError:
        return False


def other_key(error: BaseException | None) -> OtherKey | None:
    """What this error comes from, if that is another key."""
    while error is not None and not isinstance(error, OtherKey):
        error = error.__cause__ or error.__context__
    return error


def parted(url: str) -> tuple[str, str]:
    """An address and its pin, which may be empty."""
    address, _, pin = url.partition("#")
    return address, pin


def joined(url: str, pin: str) -> str:
    return f"{url}#{pin}" if pin else url


def below(url: str, path: str) -> str:
    """A path of a server whose address may carry a pin."""
    address, pin = parted(url)
    return joined(address + path, pin)


def _classes(pin: str) -> tuple[type[ssl.SSLSocket], type[ssl.SSLObject]]:
    """What a context makes of connections: their handshake ends with the check."""

    class Socket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            _check(self, pin)

    class Object(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            _check(self, pin)

    return Socket, Object


def _check(connection: ssl.SSLSocket | ssl.SSLObject, pin: str) -> None:
    found = _pin_of(connection.getpeercert(binary_form=True))
    if found != pin:
        raise OtherKey(pin, found)


def _pin_of(der: bytes | None) -> str:
    try:
        return of_certificate(der or b"")
    except ValueError as error:
        raise ssl.SSLError(1, f"its certificate cannot be read: {error}") from None


# As much of ASN.1 as leads to the key. Whatever is not written in the one way that DER allows is refused, so that this
# reader and the one inside OpenSSL never see different keys.


def _key_in(der: bytes) -> bytes:
    """Certificate → its signed part → after version, number, algorithm, issuer, dates and subject: the key, with its
    own head."""
    outer, _ = _contents(der, 0, _SEQUENCE)
    signed, _ = _contents(outer, 0, _SEQUENCE)
    at = _contents(signed, 0, _VERSION)[1] if signed[:1] == bytes([_VERSION]) else 0
    for tag in (_INTEGER, _SEQUENCE, _SEQUENCE, _SEQUENCE, _SEQUENCE):
        at = _contents(signed, at, tag)[1]
    return signed[at : _contents(signed, at, _SEQUENCE)[1]]


def _contents(data: bytes, at: int, tag: int) -> tuple[bytes, int]:
    """Of the value that begins there, and where it ends."""
    if data[at : at + 1] != bytes([tag]) or at + 2 > len(data):
        raise ValueError("it is no certificate")
    size, start = data[at + 1], at + 2
    if size >= 0x80:
        count = size & 0x7F
        size, start = int.from_bytes(data[start : start + count], "big"), start + count
        if not 1 <= count <= 4 or size < 0x80 or size >> 8 * (count - 1) == 0:
            raise ValueError("it is no certificate in DER")
    if start + size > len(data):
        raise ValueError("it has no end")
    return data[start : start + size], start + size
