"""What was learned of jobs, in a ConfigMap beside the controller: the next one need not learn it again.

There is an entry per class of jobs, and one for what the policy remembers. It is written a while after something was
learned, and when the controller ends; one that is killed in between loses a few seconds of it, which costs some speed
and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import zlib
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.errors import StrettoError
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import CONFIG_MAPS
from stretto.kubernetes.problems import ObjectNotFound

_log = logging.getLogger(__name__)

NAME = "stretto-learned"
_SPACING_S = 10.0
_LAST_WRITE_S = 2.0
_MOST_BYTES = 700_000
"""A ConfigMap may have a MiB."""
_MEMORY = "memory"
_MOST_MEMORY_BYTES = 200_000


class _Entry(msgspec.Struct, frozen=True):
    klass: str
    at_s: float
    known: msgspec.Raw


class Learned:
    def __init__(self, api: Api, namespace: str, clock: Callable[[], float]) -> None:
        self._api, self._namespace, self._clock = api, namespace, clock
        self._entries: dict[str, str] = {}
        """By key, those learned last at the end."""
        self._changes: dict[str, str | None] = {}
        self._woken = asyncio.Event()
        self.memory: dict[str, Any] | None = None
        """What the policy of the last controller remembered, once it was loaded."""
        self._packed = ""

    async def load(self) -> dict[str, bytes]:
        """By class; empty when there is nothing, or nothing that can be read."""
        try:
            found = (await self._api.get(CONFIG_MAPS, NAME, self._namespace)).get("data") or {}
        except ObjectNotFound:
            return {}
        except StrettoError as error:
            _log.warning("what was learned of jobs cannot be read, it is learned again: %s", error.message)
            return {}
        self._packed = found.pop(_MEMORY, "")
        self.memory = _unpacked(self._packed)
        read: list[tuple[_Entry, str]] = []
        for key, text in found.items():
            with contextlib.suppress(msgspec.MsgspecError):
                read.append((msgspec.json.decode(text, type=_Entry), key))
        read.sort(key=lambda one: one[0].at_s)
        self._entries = {key: found[key] for _, key in read}
        return {entry.klass: bytes(entry.known) for entry, _ in read}

    def put(self, klass: str, known: bytes) -> None:
        key = hashlib.sha256(klass.encode()).hexdigest()[:32]
        text = msgspec.json.encode(_Entry(klass, self._clock(), msgspec.Raw(known))).decode()
        self._entries.pop(key, None)
        self._entries[key] = self._changes[key] = text
        while sum(map(len, self._entries.values())) > _MOST_BYTES and len(self._entries) > 1:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            self._changes[oldest] = None
        self._woken.set()

    def put_memory(self, kept: dict[str, Any]) -> None:
        """What the policy remembers; one that remembers more than there is room for begins anew after a restart."""
        packed = base64.b64encode(zlib.compress(msgspec.json.encode(kept), 1)).decode()
        packed = packed if len(packed) <= _MOST_MEMORY_BYTES else ""
        if packed != self._packed:
            self._packed = packed
            self._changes[_MEMORY] = packed or None
            self._woken.set()

    async def run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            await asyncio.sleep(_SPACING_S)
            await self._write()

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITE_S):
                await self._write()

    async def _write(self) -> None:
        changes, self._changes = self._changes, {}
        if not changes:
            return
        try:
            await self._patch(changes)
        except StrettoError as error:
            _log.warning("what was learned of jobs could not be written: %s", error.message)
            self._take_back(changes)
        except asyncio.CancelledError:
            # Nobody knows whether it was; the last write is still to come.
            self._take_back(changes)
            raise

    def _take_back(self, changes: dict[str, str | None]) -> None:
        self._changes = changes | self._changes
        self._woken.set()

    async def _patch(self, changes: dict[str, str | None]) -> None:
        try:
            await self._api.patch(CONFIG_MAPS, NAME, {"data": changes}, self._namespace)
        except ObjectNotFound:
            data = {key: text for key, text in changes.items() if text is not None}
            made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": data}
            await self._api.create(CONFIG_MAPS, made, self._namespace)


def _unpacked(packed: str) -> dict[str, Any] | None:
    """What `put_memory` was given; None where there is nothing, or nothing that can be read."""
    with contextlib.suppress(ValueError, zlib.error, msgspec.MsgspecError):
        return msgspec.json.decode(zlib.decompress(base64.b64decode(packed)), type=dict[str, Any])
    return None
