"""How a worker and its coordinator prove themselves to each other in their first messages.

The coordinator challenges with a nonce; the worker's hello carries one of its own and its proof; the coordinator's
proof answers that. Both are bound to who the worker is and to the generation that it comes with. See `handshake.py`.
"""

from __future__ import annotations

import dataclasses

from stretto.runtime.handshake import NONCE_BYTES, Secret, nonce
from stretto.runtime.messages import Challenge, Hello, MessageError, Proof


def challenge() -> Challenge:
    return Challenge(nonce=nonce().hex())


def introduced(hello: Hello, challenge: Challenge, secret: Secret) -> Hello:
    """The worker's answer. Raises `MessageError` where there is no challenge in the challenge."""
    hello = dataclasses.replace(hello, nonce=nonce().hex())
    return dataclasses.replace(hello, proof=_proof("guest", hello, challenge, secret).hex())


def welcomed(hello: Hello, challenge: Challenge, secret: Secret) -> Proof | None:
    """The coordinator's answer to that; None if the worker does not know the secret."""
    try:
        known = _is("guest", hello.proof, hello, challenge, secret)
        return Proof(proof=_proof("host", hello, challenge, secret).hex()) if known else None
    except MessageError:
        return None


def believed(proof: Proof, hello: Hello, challenge: Challenge, secret: Secret) -> bool:
    """Whether the coordinator knows the secret. Raises `MessageError` where there is no proof in the proof."""
    return _is("host", proof.proof, hello, challenge, secret)


def _is(side: str, given: str, hello: Hello, challenge: Challenge, secret: Secret) -> bool:
    return secret.proves(_bytes(given), side, *_drawn(hello, challenge), *_about(hello))


def _proof(side: str, hello: Hello, challenge: Challenge, secret: Secret) -> bytes:
    return secret.proof(side, *_drawn(hello, challenge), *_about(hello))


def _drawn(hello: Hello, challenge: Challenge) -> tuple[bytes, bytes]:
    return _bytes(hello.nonce), _bytes(challenge.nonce)


def _about(hello: Hello) -> tuple[str | int, ...]:
    return "join", hello.worker, hello.incarnation, hello.generation


def _bytes(text: str) -> bytes:
    try:
        given = bytes.fromhex(text)
    except ValueError:
        given = b""
    if len(given) != NONCE_BYTES:
        raise MessageError("a number that was drawn, and a proof, are 32 bytes in hexadecimal digits")
    return given
