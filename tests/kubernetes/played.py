"""Played nodes for tests that are not asynchronous: the agent runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from controllers import until

from stretto.testing.kubernetes.fake_nodes import FakeNodes
from stretto.testing.kubernetes.fake_objects import FakeNode, FakePod

T = TypeVar("T")


class Played:
    def __init__(self, agent: FakeNodes, loop: asyncio.AbstractEventLoop) -> None:
        self.agent, self._loop = agent, loop

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def running(self, namespace: str, job: str) -> list[FakePod]:
        """Pods of the workers of a job that run and are to stay."""
        return [
            pod
            for pod in list(self.agent.pods.values())
            if pod.namespace == namespace
            and pod.name.startswith(f"{job}-w")
            and pod.state == "running"
            and not pod.stopping
        ]

    def finish(self, namespace: str, job: str, code: int = 0) -> None:
        """The script of every worker ends."""
        for pod in self.running(namespace, job):
            self.call(self.agent.finish(pod, code))

    def has(self, namespace: str, job: str, count: int) -> list[FakePod]:
        return until(
            lambda: pods if len(pods := self.running(namespace, job)) == count else [], f"{count} pods of {job}"
        )


@contextmanager
def played(kubeconfig: Path, nodes: Sequence[FakeNode], **options: Any) -> Iterator[Played]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def make() -> FakeNodes:
        return FakeNodes(kubeconfig, nodes, **options)

    try:
        agent = asyncio.run_coroutine_threadsafe(make(), loop).result(10)
        asyncio.run_coroutine_threadsafe(agent.__aenter__(), loop).result(60)
        try:
            yield Played(agent, loop)
        finally:
            asyncio.run_coroutine_threadsafe(agent.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
