"""The asynchronous client of a cluster: it does the work of both."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Unpack

from stretto.client.calls import Ref, Source
from stretto.client.documents import Event, Job, Piece, Why
from stretto.client.streams import RESTART_S
from stretto.errors import NotFound
from stretto.kubernetes import access
from stretto.kubernetes.client import REQUEST_TIMEOUT_S, Api
from stretto.kubernetes.fields import KIND, SERVICE_LABEL
from stretto.kubernetes.kinds import ELASTIC_JOBS, PODS
from stretto.kubernetes.model import ElasticJob, Pod
from stretto.kubernetes.pods import LAUNCH_LABEL
from stretto.kubernetes.problems import AlreadyExists, Unreachable
from stretto.kubernetes.sdk import calls, documents, logs
from stretto.kubernetes.sdk.calls import Names, told_of
from stretto.kubernetes.sdk.changes import states
from stretto.kubernetes.sdk.options import Filters, Making, Submission


class AsyncKubernetesClient:
    """A cluster, as the context of a kubeconfig names it (the current one unless `context` says otherwise), or the one
    that this program runs in. `namespace`: where names are looked for; the context's own unless given."""

    def __init__(
        self,
        context: str = "",
        *,
        kubeconfig: str | Path = "",
        namespace: str = "",
        timeout_s: float = REQUEST_TIMEOUT_S,
        clock: Callable[[], float] = time.time,  # noqa: TID251
    ) -> None:
        found = access.find(context, kubeconfig)
        self.server, self.namespace = found.server, namespace or found.namespace
        self._api = Api(found, timeout_s=timeout_s)
        self._clock = clock

    async def __aenter__(self) -> AsyncKubernetesClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._api.close()

    async def submit(self, source: Source, *, key: str | None = None, **how: Unpack[Making]) -> Job:
        """Create the ElasticJob that a job file (its path, its text, or a mapping with the same fields) becomes.

        A submission with the same `key` that has arrived is not made twice.
        """
        made = self.dry_run(source, **how)
        about = Names(made["metadata"]["namespace"], made["metadata"]["name"])
        key = key or secrets.token_hex(16)
        with told_of(about):
            return documents.job(await self._create(about, calls.marked(made, key), key))

    def dry_run(self, source: Source, **how: Unpack[Making]) -> dict[str, Any]:
        """The object that `submit` would create. Nobody is asked."""
        how["namespace"] = how.get("namespace") or self.namespace
        return calls.elastic_job_of(source, **how)

    async def run(self, source: Source, *, timeout_s: float | None = None, **how: Unpack[Submission]) -> Job:
        """Submit, and wait for the end."""
        return await self.wait(await self.submit(source, **how), timeout_s=timeout_s)

    async def wait(self, ref: Ref, *, timeout_s: float | None = None, patience_s: float = RESTART_S) -> Job:
        """The job once it has ended; `TimeoutError` when that takes too long. One whose object was deleted was
        cancelled; one that the controller refuses is a `SpecError`."""
        try:
            found = await self._get(ref)
        except NotFound:
            if isinstance(ref, Job):
                return documents.deleted(ref, self._clock())
            raise
        async with asyncio.timeout(timeout_s):
            with told_of(self._names(ref)):
                last = await logs.ended(self._api, found, patience_s)
        return documents.job(last) if last is not None else documents.deleted(documents.job(found), self._clock())

    async def job(self, ref: Ref) -> Job:
        found = await self._get(ref)
        return documents.job(found, await self._pods(found))

    async def jobs(self, **filters: Unpack[Filters]) -> AsyncGenerator[Job, None]:
        """All jobs that fit. `namespace="*"`: those of all namespaces; a job's user is its namespace."""
        wanted = calls.Wanted(**filters)
        where = wanted.namespace or self.namespace
        where = "" if where == calls.ANYWHERE else where
        with told_of():
            found = (await self._api.list(ELASTIC_JOBS, where, labels=wanted.selector)).items
            workers = (await self._api.list(PODS, where, labels=LAUNCH_LABEL)).items if found else []
            if any(one.spec.get("service") for one in found):
                workers += (await self._api.list(PODS, where, labels=SERVICE_LABEL)).items
        for job in wanted.among(self._described(found, workers)):
            yield job

    async def cancel(self, ref: Ref) -> Job:
        """Deletes the object: its workers are asked to end, and then nothing is left of it, its logs included."""
        found = await self._get(ref)
        calls.must_not_have_ended(found)
        with told_of(self._names(ref)):
            await self._api.delete(ELASTIC_JOBS, found.metadata.name, found.metadata.namespace, uid=found.metadata.uid)
        return Job({**documents.job(found), "wish": "cancel"})

    async def suspend(self, ref: Ref, *, force: bool = False) -> Job:
        """The object is the user's word, and is followed: `force` is for a server's client."""
        return await self._change(ref, lambda found: calls.suspension(found, True))

    async def resume(self, ref: Ref) -> Job:
        return await self._change(ref, lambda found: calls.suspension(found, False))

    async def scale(self, ref: Ref, min: int | None = None, max: int | None = None, *, force: bool = False) -> Job:
        return await self._change(ref, lambda found: calls.scaling(found, min, max))

    async def why(self, ref: Ref) -> Why:
        """What the controller told in the object's status, and what keeps pods from starting."""
        found = await self._get(ref)
        return documents.why(found, await self._pods(found))

    async def events(
        self, ref: Ref | None = None, *, after: int | None = None, limit: int = 200, order: str | None = None
    ) -> list[Event]:
        """What the cluster still knows of (an hour, by default): of one job, or of all in the namespace."""
        namespace, selection = await self._about(ref)
        with told_of():
            found = await self._api.list(documents.CORE_EVENTS, namespace, fields=selection)
        told = sorted(map(documents.event, found.items), key=lambda event: event.seq)
        told = [event for event in told if after is None or event.seq > after]
        return told[::-1][:limit] if order == "newest" else told[:limit]

    async def watch(
        self, ref: Ref | None = None, *, after: int | None = None, patience_s: float = RESTART_S
    ) -> AsyncGenerator[Event, None]:
        """Events as they happen, for ever; with `after`, those since then first."""
        namespace, selection = await self._about(ref)
        seen = states(
            self._api, documents.CORE_EVENTS, namespace, fields=selection, patience_s=patience_s
        )  # fmt: skip
        with told_of():
            async with aclosing(seen):
                async for present in seen:
                    if after is None:
                        after = max((documents.sequence(one.metadata) for one in present.values()), default=0)
                        continue
                    told = sorted(map(documents.event, present.values()), key=lambda event: event.seq)
                    for event in told:
                        if event.seq > after:
                            after = event.seq
                            yield event

    async def logs(self, ref: Ref, *, worker: str | None = None, tail: int | None = None) -> str:
        found = await self._get(ref)
        own = logs.chosen(await self._pods(found), worker)
        with told_of():
            return await logs.read(self._api, own, tail)

    async def follow(
        self,
        ref: Ref,
        *,
        worker: str | None = None,
        tail: int | None = None,
        tick_s: float | None = None,
        patience_s: float = RESTART_S,
    ) -> AsyncGenerator[Piece, None]:
        """The log as it is written, until the job has ended or its object has gone."""
        try:
            found = await self._get(ref)
        except NotFound:
            if isinstance(ref, Job):
                return
            raise
        with told_of(self._names(ref)):
            following = logs.Following(self._api, found, worker, tail, patience_s)
            async with aclosing(following.pieces(tick_s)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _create(self, about: Names, made: Mapping[str, Any], key: str) -> ElasticJob:
        """Once more when the answer was lost: whether it is there already, and ours, tells what became of the first."""
        try:
            return await self._api.create(ELASTIC_JOBS, made, about.namespace)
        except AlreadyExists:
            return await self._ours(about, key)
        except Unreachable:
            try:
                return await self._api.create(ELASTIC_JOBS, made, about.namespace)
            except AlreadyExists:
                return await self._ours(about, key)

    async def _ours(self, about: Names, key: str) -> ElasticJob:
        found = await self._api.get(ELASTIC_JOBS, about.name, about.namespace)
        if not calls.is_of(found, key):
            raise AlreadyExists(f"there is a job {about} already", status=409, reason="AlreadyExists")
        return found

    async def _get(self, ref: Ref) -> ElasticJob:
        about = self._names(ref)
        with told_of(about if isinstance(ref, Job) else str(ref)):
            found = await self._api.get(ELASTIC_JOBS, about.name, about.namespace)
        if isinstance(ref, Job) and ref.get("uid", found.metadata.uid) != found.metadata.uid:
            raise NotFound(f"there is no job {str(about)!r} any more", hint="another one has its name now")
        return found

    async def _change(self, ref: Ref, patch: Callable[[ElasticJob], dict[str, Any]]) -> Job:
        found = await self._get(ref)
        with told_of(self._names(ref)):
            changed = await self._api.patch(ELASTIC_JOBS, found.metadata.name, patch(found), found.metadata.namespace)
        return documents.job(changed, await self._pods(changed))

    async def _pods(self, found: ElasticJob) -> list[Pod]:
        with told_of():
            among = await self._api.list(PODS, found.metadata.namespace, labels=documents.selector(found))
        return documents.pods_of(found, among.items)

    async def _about(self, ref: Ref | None) -> tuple[str, str]:
        """Where the events of a job, or of all, are."""
        if ref is None:
            return self.namespace, f"involvedObject.kind={KIND}"
        meta = (await self._get(ref)).metadata
        return meta.namespace, f"involvedObject.kind={KIND},involvedObject.uid={meta.uid}"

    def _described(self, found: Iterable[ElasticJob], workers: Iterable[Pod]) -> list[Job]:
        """Each with its own pods, which are looked up by their owner, not searched."""
        by_label: dict[tuple[str, str], list[Pod]] = {}
        for pod in workers:
            by_label.setdefault((pod.metadata.namespace, documents.owner_name(pod)), []).append(pod)
        return [documents.job(one, documents.pods_of(one, by_label.get(one.metadata.key, ()))) for one in found]

    def _names(self, ref: Ref) -> Names:
        return calls.names(ref, self.namespace)
