"""The synchronous client of a cluster: the asynchronous one, on an event loop in a thread of its own.

So it works from several threads, and where another event loop runs already (a notebook). A call that is interrupted is
cancelled over there.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, TypeVar, Unpack, cast

from stretto.client.calls import Ref, Source
from stretto.client.documents import Event, Job, Piece, Why
from stretto.client.options import Following
from stretto.client.streams import RESTART_S
from stretto.kubernetes.client import REQUEST_TIMEOUT_S
from stretto.kubernetes.sdk.asynchronous import AsyncKubernetesClient
from stretto.kubernetes.sdk.options import Filters, Making, Submission

T = TypeVar("T")


class KubernetesClient:
    """`AsyncKubernetesClient` for programs that are not asynchronous; see there."""

    def __init__(
        self,
        context: str = "",
        *,
        kubeconfig: str | Path = "",
        namespace: str = "",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._client = AsyncKubernetesClient(context, kubeconfig=kubeconfig, namespace=namespace, timeout_s=timeout_s)
        self.server, self.namespace = self._client.server, self._client.namespace
        self._loop = _Loop()

    def __enter__(self) -> KubernetesClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.close(self._client.close)

    def submit(self, source: Source, **how: Unpack[Submission]) -> Job:
        return self._loop.run(self._client.submit(source, **how))

    def dry_run(self, source: Source, **how: Unpack[Making]) -> dict[str, Any]:
        return self._client.dry_run(source, **how)

    def run(self, source: Source, *, timeout_s: float | None = None, **how: Unpack[Submission]) -> Job:
        return self.wait(self.submit(source, **how), timeout_s=timeout_s)

    def wait(self, ref: Ref, *, timeout_s: float | None = None, patience_s: float = RESTART_S) -> Job:
        return self._loop.run(self._client.wait(ref, timeout_s=timeout_s, patience_s=patience_s))

    def job(self, ref: Ref) -> Job:
        return self._loop.run(self._client.job(ref))

    def jobs(self, **filters: Unpack[Filters]) -> Generator[Job, None, None]:
        return self._loop.iterate(self._client.jobs(**filters))

    def cancel(self, ref: Ref) -> Job:
        """Deletes the object: its workers are asked to end, and then nothing is left of it, its logs included."""
        return self._loop.run(self._client.cancel(ref))

    def suspend(self, ref: Ref, *, force: bool = False) -> Job:
        return self._loop.run(self._client.suspend(ref))

    def resume(self, ref: Ref) -> Job:
        return self._loop.run(self._client.resume(ref))

    def scale(self, ref: Ref, min: int | None = None, max: int | None = None, *, force: bool = False) -> Job:
        return self._loop.run(self._client.scale(ref, min, max))

    def why(self, ref: Ref) -> Why:
        return self._loop.run(self._client.why(ref))

    def events(
        self, ref: Ref | None = None, *, after: int | None = None, limit: int = 200, order: str | None = None
    ) -> list[Event]:
        return self._loop.run(self._client.events(ref, after=after, limit=limit, order=order))

    def watch(
        self, ref: Ref | None = None, *, after: int | None = None, patience_s: float = RESTART_S
    ) -> Generator[Event, None, None]:
        return self._loop.iterate(self._client.watch(ref, after=after, patience_s=patience_s))

    def logs(self, ref: Ref, *, worker: str | None = None, tail: int | None = None) -> str:
        return self._loop.run(self._client.logs(ref, worker=worker, tail=tail))

    def follow(self, ref: Ref, **how: Unpack[Following]) -> Generator[Piece, None, None]:
        return self._loop.iterate(self._client.follow(ref, **how))


class _Loop:
    """An event loop in a thread, from the first call on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        loop = self._running()
        try:
            while (item := self.run(_next(items))) is not _END:
                yield cast(T, item)
        finally:
            # Whoever closed the client has ended it with everything else.
            if self._loop is loop:
                self.run(_closed(items))

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`last`: what is to be done there before it ends."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_wound_up(last), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                made: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
                self._thread = threading.Thread(target=_turn, args=(made,), name="stretto-client", daemon=True)
                self._thread.start()
                self._loop = made.get()
            return self._loop


_END = object()


def _turn(made: queue.SimpleQueue[asyncio.AbstractEventLoop]) -> None:
    """Until it is stopped; what is still under way then is cancelled."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        made.put(loop)
        loop.run_forever()


async def _next(items: AsyncGenerator[T, None]) -> T | object:
    return await anext(items, _END)


async def _wound_up(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """What is under way ends first: it would open connections behind whoever closes them."""
    under_way = asyncio.all_tasks() - {asyncio.current_task()}
    for task in under_way:
        task.cancel()
    await asyncio.gather(*under_way, return_exceptions=True)
    await last()


async def _closed(items: AsyncGenerator[T, None]) -> None:
    """End it, once a call of its that was interrupted has ended."""
    own = asyncio.current_task()
    cancelled = [task for task in asyncio.all_tasks() if task is not own and task.cancelling()]
    await asyncio.gather(*cancelled, return_exceptions=True)
    await items.aclose()
