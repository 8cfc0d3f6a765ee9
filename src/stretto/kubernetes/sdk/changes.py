"""Objects as they are and as they change, for somebody who waits for something: list, watch, and again.

Unlike `Watched`, which serves a controller and never gives up, this ends with the error when the server cannot be
reached for too long, and at once with one that waiting does not mend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from stretto.client.streams import Patience
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import Kind
from stretto.kubernetes.problems import Gone, Unreachable
from stretto.kubernetes.watching import HasMeta

T = TypeVar("T", bound=HasMeta)

_WATCH_S = 300
_PAUSE_S = 0.2
"""A server that ends watches at once must not be asked in a tight loop."""


async def states(
    api: Api, kind: Kind[T], namespace: str, *, labels: str = "", fields: str = "", patience_s: float
) -> AsyncGenerator[dict[str, T], None]:
    """All objects by uid: now, and whenever one of them has changed. The same dictionary, brought up to date."""
    patience = Patience(patience_s)
    present: dict[str, T] = {}
    version = ""
    while True:
        try:
            if not version:
                listing = await api.list(kind, namespace, labels=labels, fields=fields)
                version = listing.resource_version
                present.clear()
                present.update((item.metadata.uid, item) for item in listing.items)
                patience.worked()
                yield present
            watching = api.watch(
                kind, namespace, resource_version=version, labels=labels, fields=fields, timeout_s=_WATCH_S
            )
            async with aclosing(watching):
                async for event in watching:
                    patience.worked()
                    version = event.resource_version or version
                    if event.object is None:
                        continue
                    if event.type == "DELETED":
                        present.pop(event.object.metadata.uid, None)
                    else:
                        present[event.object.metadata.uid] = event.object
                    yield present
            await asyncio.sleep(_PAUSE_S)
        except Gone:
            version = ""
        except Unreachable as error:
            await asyncio.sleep(patience.failed(error))
