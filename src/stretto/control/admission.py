"""How a worker's connection is let in: challenged, proved in both directions, within bounds of length, time and number.

Before the proof one message of a few kilobytes is read, within a few seconds; only so many connections may be that far
at a time, and when there are more, the one that has been there longest is closed. Who does not know the job's secret
learns nothing but that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from stretto.runtime import introduction
from stretto.runtime.handshake import Secret
from stretto.runtime.messages import (
    LONGEST_SAID,
    LONGEST_UNPROVEN,
    PROTOCOL,
    Hello,
    Message,
    MessageError,
    decode,
    encode,
)

MOST_UNPROVEN = 256
PROVE_S = 10.0


class Socket(Protocol):
    """A WebSocket, whoever accepted it. What is closed raises `ConnectionClosed` or `ConnectionError`."""

    def __aiter__(self) -> AsyncIterator[str | bytes]: ...

    async def send(self, message: str) -> None: ...

    async def close(self, code: int = 1000, reason: str = "") -> None: ...


@runtime_checkable
class Widening(Protocol):
    """One that takes in short messages only, until it is told otherwise."""

    def widen(self, most_bytes: int) -> None: ...


class Refused(Exception):
    """This connection is not let in, or not let on."""


class Admission:
    """The entrance of one job."""

    def __init__(self, secret: str, *, prove_s: float = PROVE_S, most: int = MOST_UNPROVEN) -> None:
        self._secret, self._prove_s, self._most = Secret(secret), prove_s, most
        self._unproven: dict[asyncio.Timeout, None] = {}
        """The oldest first."""

    async def admit(self, socket: Socket, words: AsyncIterator[str | bytes]) -> Hello:
        """The hello of a worker of this job. Raises `Refused`, and what a socket raises that is closed."""
        if len(self._unproven) >= self._most:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        patience = asyncio.timeout(self._prove_s)
        try:
            async with patience:
                self._unproven[patience] = None
                challenge = introduction.challenge()
                await socket.send(encode(challenge))
                hello = _hello(await anext(words))
                proof = introduction.welcomed(hello, challenge, self._secret)
                if proof is None:
                    raise Refused("the token is wrong: a worker needs the secret of its own job (STRETTO_TOKEN)")
                await socket.send(encode(proof))
        except StopAsyncIteration:
            raise ConnectionError("it has gone") from None
        except TimeoutError:
            raise Refused("it has not proved in time that it belongs to the job") from None
        finally:
            self._unproven.pop(patience, None)
        if isinstance(socket, Widening):
            socket.widen(LONGEST_SAID)
        return hello


def understood(text: str | bytes, most: int) -> Message:
    """What a worker has said; raises `Refused`."""
    if not isinstance(text, str):
        raise Refused("not understood: it is not text")
    if len(text) > most:
        raise Refused(f"not understood: it is longer than {most} characters")
    try:
        return decode(text)
    except MessageError as error:
        raise Refused(f"not understood: {error}") from None


def _hello(text: str | bytes) -> Hello:
    hello = understood(text, LONGEST_UNPROVEN)
    if not isinstance(hello, Hello):
        raise Refused("a worker says hello first")
    if hello.protocol != PROTOCOL:
        raise Refused(
            f"the worker speaks protocol {hello.protocol}, the coordinator {PROTOCOL}: install the same version"
        )
    return hello
