"""Whether a submission would be accepted at this moment: what `/readyz` says is what `submit` does.

What the server knows of itself (it is going down, its loop does not run or cannot decide, what happened cannot be
written) keeps submissions out. Whether the store takes anything is found out by writing something: a disk that is full,
a database that is locked or away is known only then. Many who ask at once cost one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stretto.errors import StrettoError
from stretto.store import Store

_PATIENCE_S = 2.0
_SETTING = "probe"
_AS_LARGE_AS_A_JOB = "-" * 4096


class Readiness:
    def __init__(self, store: Store, known: Callable[[], str]) -> None:
        """`known`: why not, as far as nobody has to be asked; empty if nothing is known."""
        self._store, self._known = store, known
        self._writing: asyncio.Task[str] | None = None

    async def trouble(self) -> str:
        """Why nothing can be submitted; empty if it can."""
        if known := self._known():
            return known
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._try())
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(self._writing) or self._known()
        except TimeoutError:
            return f"the store has not written anything for {_PATIENCE_S:g} s"

    async def _try(self) -> str:
        try:
            await asyncio.wrap_future(self._store.put_setting(_SETTING, _AS_LARGE_AS_A_JOB))
        except StrettoError as error:
            return error.message
        return ""
