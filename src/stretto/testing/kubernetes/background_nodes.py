"""Played nodes for tests and programs that are not asynchronous: the agent runs in a thread.

with BackgroundNodes(kubeconfig, [FakeNode(name="n0")]) as nodes:
    nodes.wait(lambda agent: len(agent.pods) == 3)
    nodes.do(lambda agent: agent.fail("n0"))
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from stretto.testing.kubernetes.fake_nodes import FakeNodes
from stretto.testing.kubernetes.fake_objects import FakeNode

_Result = TypeVar("_Result")


class BackgroundNodes:
    """Takes what `FakeNodes` takes."""

    def __init__(self, kubeconfig: Path, nodes: Iterable[FakeNode], **options: Any) -> None:
        self._make: Callable[[], FakeNodes] = lambda: FakeNodes(kubeconfig, nodes, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-nodes")

    def __enter__(self) -> BackgroundNodes:
        self._thread.start()
        try:
            self._agent = self._run(self._enter())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run(self._agent.__aexit__(kind, error, trace))
        finally:
            self._end()

    def do(self, what: Callable[[FakeNodes], Coroutine[Any, Any, _Result]]) -> _Result:
        """One of the agent's own methods; returns when it is done."""
        return self._run(what(self._agent))

    def ask(self, what: Callable[[FakeNodes], _Result]) -> _Result:
        """What the agent knows at one moment."""

        async def answer() -> _Result:
            return what(self._agent)

        return self._run(answer())

    def wait(self, condition: Callable[[FakeNodes], bool], deadline_s: float = 60.0) -> None:
        self._run(self._agent.wait(lambda: condition(self._agent), deadline_s))

    async def _enter(self) -> FakeNodes:
        return await self._make().__aenter__()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
