"""The logs of a job's pods: what is there, and what is being written.

Kubelet keeps a pod's log as long as the pod is there, and workers that have ended stay for that. Nothing is seen twice
when a connection breaks: the next one begins at the beginning, and the bytes that are known are passed over.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any

from stretto.client.documents import ENDED, Piece
from stretto.client.streams import Patience
from stretto.errors import NotFound, SpecError
from stretto.kubernetes.client import Api
from stretto.kubernetes.fields import TRAINS
from stretto.kubernetes.kinds import ELASTIC_JOBS, PODS
from stretto.kubernetes.model import ElasticJob, Pod
from stretto.kubernetes.problems import Invalid, ObjectNotFound, Unreachable
from stretto.kubernetes.sdk import documents
from stretto.kubernetes.sdk.changes import states

LAST_WORDS_S = 10.0
"""So long after a job's end its pods may take to finish their logs; those of a lost node never do."""
_AGAIN_S = 0.5
_MOST_WAITING = 1000
"""Pieces; who reads slowly holds the logs back."""


def chosen(own: list[Pod], worker: str | None) -> list[Pod]:
    """The pods whose logs are meant."""
    if worker is None:
        return own
    found = [pod for pod in own if documents.worker_name(pod) == worker]
    if not found:
        known = ", ".join(map(documents.worker_name, own)) or "none"
        raise NotFound(f"there is no worker {worker!r}", hint=f"known: {known}")
    return found


async def read(api: Api, own: list[Pod], tail: int | None) -> str:
    """What they printed. Where there are several, each begins with a line that names it."""
    texts = await asyncio.gather(*(_whole(api, pod, tail) for pod in own))
    told = [text.decode(errors="replace") for text in texts]
    if len(own) < 2:
        return "".join(told)
    named = zip(own, told, strict=True)
    return "".join(
        f"==> {documents.worker_name(pod)} <==\n{text}" + ("" if text.endswith("\n") or not text else "\n")
        for pod, text in named
    )


class Following:
    """All that a job's workers print, those that come later included, until the job has ended."""

    def __init__(self, api: Api, found: ElasticJob, worker: str | None, tail: int | None, patience_s: float) -> None:
        self._api, self._found, self._worker, self._tail, self._patience_s = api, found, worker, tail, patience_s
        self._queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(_MOST_WAITING)
        self._pods: dict[str, Pod] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._count = 0

    async def pieces(self, tick_s: float | None) -> AsyncGenerator[Piece, None]:
        """With `tick_s` an empty one whenever nothing was written for so long."""
        tasks = [asyncio.create_task(self._guarded(work)) for work in (self._watch_pods(), self._until_end())]
        try:
            while True:
                try:
                    async with asyncio.timeout(tick_s):
                        told = await self._queue.get()
                except TimeoutError:
                    yield Piece("", "")
                    continue
                if told is None:
                    return
                if isinstance(told, Exception):
                    raise told
                yield told
        finally:
            tasks += self._reading.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            await self._queue.put(error)

    async def _watch_pods(self) -> None:
        meta, labels = self._found.metadata, documents.selector(self._found)
        seen = states(self._api, PODS, meta.namespace, labels=labels, patience_s=self._patience_s)
        async with aclosing(seen):
            async for present in seen:
                self._pods = present
                self._begin(present.values())

    def _begin(self, present: Iterable[Pod]) -> None:
        """Read the logs of those pods that have one by now."""
        for pod in documents.pods_of(self._found, present):
            uid = pod.metadata.uid
            has_begun = pod.is_bound and pod.status.phase in ("Running", "Succeeded", "Failed")
            is_wanted = self._worker in (None, documents.worker_name(pod))
            if has_begun and is_wanted and uid not in self._reading:
                self._reading[uid] = asyncio.create_task(self._guarded(self._read(pod)))

    async def _until_end(self) -> None:
        """The end of the job, then of the logs that there are."""
        await ended(self._api, self._found, self._patience_s)
        namespace, labels = self._found.metadata.namespace, documents.selector(self._found)
        # What was watched may be behind; whoever ended before the job did is in this list.
        self._begin((await self._api.list(PODS, namespace, labels=labels)).items)
        while running := [task for task in self._reading.values() if not task.done()]:
            before = self._count
            _, late = await asyncio.wait(running, timeout=LAST_WORDS_S)
            if late and self._count == before and self._queue.empty():
                break
        await self._queue.put(None)

    async def _read(self, pod: Pod) -> None:
        worker = documents.worker_name(pod)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for piece in self._bytes(pod):
            self._count += 1
            if text := decoder.decode(piece):
                await self._queue.put(Piece(worker, text))
        if text := decoder.decode(b"", final=True):
            await self._queue.put(Piece(worker, text))

    async def _bytes(self, pod: Pod) -> AsyncIterator[bytes]:
        """Until its container has ended, or the pod has gone."""
        known, patience = 0, Patience(self._patience_s)
        if self._tail is not None:
            # Only the whole log tells at which byte its last lines begin.
            known = _start_of_last(await _whole(self._api, pod, None), self._tail)
        while True:
            at, was_over = 0, self._is_over(pod)
            try:
                async with aclosing(_log(self._api, pod, follow=True)) as log:
                    async for piece in log:
                        patience.worked()
                        fresh, at = piece[max(0, known - at) :], at + len(piece)
                        known = max(known, at)
                        if fresh:
                            yield fresh
                if was_over:
                    return
                await asyncio.sleep(_AGAIN_S)
            except (ObjectNotFound, Invalid):
                if was_over:
                    return
                await asyncio.sleep(_AGAIN_S)
            except Unreachable as error:
                if was_over:
                    return  # Its node may be gone for good.
                await asyncio.sleep(patience.failed(error))

    def _is_over(self, pod: Pod) -> bool:
        now = self._pods.get(pod.metadata.uid)
        return now is None or now.is_terminal


async def ended(api: Api, found: ElasticJob, patience_s: float) -> ElasticJob | None:
    """The object once its job has ended; None when it was deleted. `SpecError` when it is no valid job."""
    meta = found.metadata
    seen = states(api, ELASTIC_JOBS, meta.namespace, fields=f"metadata.name={meta.name}", patience_s=patience_s)
    async with aclosing(seen):
        async for present in seen:
            now = present.get(meta.uid)
            if now is None:
                return None
            phase = documents.phase(now)
            if phase in ENDED:
                return now
            if phase == "invalid":
                raise SpecError(
                    f"job {meta.namespace}/{meta.name} was refused: {now.status.get('message')}",
                    hint=f"correct it with kubectl edit elasticjob {meta.name} -n {meta.namespace}, or delete it",
                )
    raise AssertionError("what is watched does not end by itself")


async def _whole(api: Api, pod: Pod, tail: int | None) -> bytes:
    """Nothing, while the container has not started or when the pod has gone."""
    with suppress(ObjectNotFound, Invalid):
        async with aclosing(_log(api, pod, tail=tail)) as log:
            return b"".join([piece async for piece in log])
    return b""


def _log(api: Api, pod: Pod, *, follow: bool = False, tail: int | None = None) -> AsyncGenerator[bytes, None]:
    """Of the container that trains."""
    containers = [container.name for container in pod.spec.containers]
    name = TRAINS if TRAINS in containers else next(iter(containers), "")
    return api.log(pod.metadata.namespace, pod.metadata.name, name, follow=follow, tail=tail)


def _start_of_last(text: bytes, lines: int) -> int:
    """Where the last so many lines begin."""
    whole = text.splitlines(keepends=True)
    return len(text) - sum(map(len, whole[max(0, len(whole) - lines) :]))
