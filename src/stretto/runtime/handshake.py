"""How the two ends of a connection show each other that they know their job's secret, without saying it.

Each end sends a number that it has just drawn, and proves that it knows the secret by a keyed hash over both numbers
and over what the connection is for: who proves it (the host, who was called, or the guest), in which role, in which
generation. So nothing that was overheard is of use on another connection, and nothing can be sent back to whoever said
it. The secret is a job's own: what is bound to the secret is bound to the job.

On a plain socket it takes one exchange: the guest's `Greeting`, the host's answer, and the guest's proof, which
travels with the first thing that the guest has to say. What is said afterwards is neither hidden nor sealed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

NONCE_BYTES = PROOF_BYTES = 32

_GREETING = struct.Struct(">8s16sQ32s")
"""What we speak, the role, the generation, the guest's nonce."""
_WORD = b"stretto2"
GREETING_BYTES = _GREETING.size
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


class Stranger(ConnectionError):
    """The other end does not know the secret, or does not speak our language."""


class Secret:
    """A job's secret; `text` empty is that of nobody, with which anybody is let in who has none either."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        self._key = hmac.digest(b"stretto on the wire", text.encode("utf-8", "surrogatepass"), hashlib.sha256)

    def proof(self, side: str, guest: bytes, host: bytes, *about: str | int) -> bytes:
        """What `side` (`guest` or `host`) sends where these nonces were drawn, and `about` is what it is for."""
        parts = [side.encode(), guest, host, *(str(one).encode("utf-8", "surrogatepass") for one in about)]
        told = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, told, hashlib.sha256)

    def proves(self, given: bytes, side: str, guest: bytes, host: bytes, *about: str | int) -> bool:
        return hmac.compare_digest(given, self.proof(side, guest, host, *about))


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


class Greeting:
    """The guest's side."""

    def __init__(self, secret: Secret, role: str, generation: int) -> None:
        self._secret, self._about = secret, (role, generation)
        self._nonce = nonce()
        self.said = _GREETING.pack(_WORD, role.encode(), generation, self._nonce)
        """To be sent first; `ANSWER_BYTES` come back."""

    def prove(self, answer: bytes) -> bytes:
        """What goes before everything else that is said. Raises `Stranger` if the host has not proved itself."""
        host, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not self._secret.proves(given, "host", self._nonce, host, *self._about):
            raise Stranger("the other end does not know the secret of this job")
        return self._secret.proof("guest", self._nonce, host, *self._about)


class Reception:
    """The host's side, for one guest."""

    def __init__(self, secret: Secret, role: str, generation: int | None = None) -> None:
        """`generation`: the only one that is welcome here."""
        self._secret, self._role, self._only = secret, role, generation
        self._nonce = nonce()
        self._guest = b""
        self.generation = -1
        """That the guest comes for, once it has greeted."""

    def answer(self, greeting: bytes) -> bytes:
        """To a greeting of `GREETING_BYTES`; raises `Stranger`."""
        word, role, generation, self._guest = _GREETING.unpack(greeting)
        if word != _WORD or role.rstrip(b"\0") != self._role.encode() or self._only not in (None, generation):
            raise Stranger("this is not what is spoken here")
        self.generation = generation
        about = self._role, generation
        return self._nonce + self._secret.proof("host", self._guest, self._nonce, *about)

    def admits(self, proof: bytes) -> bool:
        """Whether these `PROOF_BYTES` show that the guest knows the secret."""
        return self._secret.proves(proof, "guest", self._guest, self._nonce, self._role, self.generation)
