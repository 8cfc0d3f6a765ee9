"""A cache of one kind of object, kept true by list and watch: every change is told once, none is missed.

The watch goes on from the version it has reached, whatever ended it: the server's time-out (every five to ten
minutes), a broken or silent connection, an error. When the server does not keep that version any more (410), everything
is listed again and only the difference is told, deletions that nobody saw included. There is one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from stretto.errors import StrettoError
from stretto.kubernetes.client import Api, Event
from stretto.kubernetes.kinds import Kind
from stretto.kubernetes.model import Meta
from stretto.kubernetes.problems import Gone, Invalid, Unreadable

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""(namespace, name)."""

SHORTEST_WATCH_S, LONGEST_WATCH_S = 300, 600
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0


class HasMeta(Protocol):
    @property
    def metadata(self) -> Meta: ...


T = TypeVar("T", bound=HasMeta)

OnChange = Callable[[T | None, T | None], None]
"""Told (old, new): old is None for something new, new is None for something gone."""


class Watched(Generic[T]):
    """Run `run()` as a task; `synced` is set when everything has been read once."""

    def __init__(
        self,
        api: Api,
        kind: Kind[T],
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        page: int = 500,
        resync_s: float | None = None,
        quiet_s: float = 150.0,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resync_s`: list everything anew that often. `quiet_s`: how long a watch may be silent; the server sends a
        bookmark every minute."""
        self.items: dict[Key, T] = {}
        """As of now. Not to be written to."""
        self.synced = asyncio.Event()
        self.last_seen_s = clock()
        """When the server last told us something, on `clock`."""
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._page = page
        self._resync_s = resync_s
        self._quiet_s = quiet_s
        self._rng = rng or random.Random()
        self._clock = clock
        self._callbacks: list[OnChange[T]] = []
        self._listed_s = 0.0
        self._version = ""
        self._pause_s = 0.0
        self._is_running = False

    def on_change(self, callback: OnChange[T]) -> None:
        """Call this for every change from now on, in the event loop, after `items` has it."""
        self._callbacks.append(callback)

    def stale_s(self) -> float:
        """For how long we have heard nothing; more than a minute or two means that the cache may be wrong."""
        return self._clock() - self.last_seen_s

    async def run(self) -> None:
        """Until it is cancelled. Only an exception of a callback ends it otherwise."""
        if self._is_running:
            raise RuntimeError(f"{self._kind} is being watched already")
        self._is_running = True
        try:
            while True:
                await self._round()
        finally:
            self._is_running = False

    async def _round(self) -> None:
        """Get to know everything, or follow the changes until the stream ends."""
        try:
            if not self._version or self._is_resync_due():
                await self._list()
            started_s = self._clock()
            await self._follow()
            # A server that ends watches at once must not be asked in a tight loop.
            if self._clock() - started_s < 1.0:
                await self._pause()
        except (Gone, Invalid, Unreadable) as error:
            log.info("%s: listing again after version %s: %s", self._kind.plural, self._version, error.message)
            self._version = ""
            await self._pause()
        except StrettoError as error:
            log.warning("watching %s: %s", self._kind.plural, error.message)
            await self._pause()

    async def _list(self) -> None:
        try:
            listing = await self._api.list(
                self._kind, self._namespace, labels=self._labels, fields=self._fields, page=self._page
            )
        except Gone:
            # The pages went stale while we read them: this time without pages.
            listing = await self._api.list(
                self._kind, self._namespace, labels=self._labels, fields=self._fields, page=0
            )
        self._heard()
        self._listed_s = self._clock()
        self._version = listing.resource_version
        present = {item.metadata.key: item for item in listing.items}
        for key in self.items.keys() - present.keys():
            self._forget(key)
        for key, item in present.items():
            self._take(key, item)
        self.synced.set()

    async def _follow(self) -> None:
        stream = self._api.watch(
            self._kind, self._namespace, resource_version=self._version, labels=self._labels, fields=self._fields,
            timeout_s=self._watch_for_s(), quiet_s=self._quiet_s,
        )  # fmt: skip
        async with aclosing(stream):
            async for event in stream:
                self._heard()
                self._apply(event)

    def _apply(self, event: Event[T]) -> None:
        item = event.object
        if item is not None:
            key = item.metadata.key
            if event.type == "DELETED":
                self._forget(key)
            else:
                self._take(key, item)
        # Last, so that a callback's failure does not lose the event.
        self._version = event.resource_version or self._version

    def _take(self, key: Key, item: T) -> None:
        old = self.items.get(key)
        if old is not None and old.metadata.uid != item.metadata.uid:
            # Deleted and made again while we looked away: two changes, not one.
            self._forget(key)
            old = None
        if old is not None and old.metadata.resource_version == item.metadata.resource_version:
            return
        self.items[key] = item
        self._tell(old, item)

    def _forget(self, key: Key) -> None:
        old = self.items.pop(key, None)
        if old is not None:
            self._tell(old, None)

    def _tell(self, old: T | None, new: T | None) -> None:
        for callback in self._callbacks:
            callback(old, new)

    def _heard(self) -> None:
        self.last_seen_s = self._clock()
        self._pause_s = 0.0

    async def _pause(self) -> None:
        """Longer each time, until the server tells us something again."""
        self._pause_s = min(max(2.0 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        await asyncio.sleep(self._rng.uniform(0.5, 1.0) * self._pause_s)

    def _is_resync_due(self) -> bool:
        return self._resync_s is not None and self._clock() - self._listed_s >= self._resync_s

    def _watch_for_s(self) -> int:
        watch_s = self._rng.randint(SHORTEST_WATCH_S, LONGEST_WATCH_S)
        if self._resync_s is None:
            return watch_s
        return max(1, min(watch_s, round(self._listed_s + self._resync_s - self._clock())))
