"""Services: what they are made of is applied and looked after here; where replicas run is kube-scheduler's affair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from stretto.kubernetes import status
from stretto.kubernetes.client import Api
from stretto.kubernetes.keeping import Card
from stretto.kubernetes.kinds import DEPLOYMENTS, HPAS, HPAS_BEFORE_1_23, SERVICES, Kind
from stretto.kubernetes.model import ElasticJob
from stretto.kubernetes.problems import ApiError, ObjectNotFound
from stretto.kubernetes.register import Key
from stretto.kubernetes.services import service_objects

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_MANAGER = "stretto-controller"


class ServiceKeeper:
    def __init__(self, api: Api, gpu_resource: str, clock: Callable[[], float]) -> None:
        self._api, self._gpu_resource, self._clock = api, gpu_resource, clock
        self._kept: dict[Key, tuple[ElasticJob, Card]] = {}
        self._applied: dict[Key, int] = {}
        """The generation that was applied last."""
        self._has_v2: bool | None = None
        self._woken = asyncio.Event()

    def put(self, job: ElasticJob, card: Card) -> None:
        """A service, or a newer version of one."""
        self._kept[job.metadata.key] = job, card
        self._woken.set()

    def remove(self, key: Key) -> None:
        """Its objects go with their owner."""
        self._kept.pop(key, None)
        self._applied.pop(key, None)

    def card(self, key: Key) -> Card | None:
        return self._kept[key][1] if key in self._kept else None

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._woken.wait()
            self._woken.clear()
            for key, (job, card) in list(self._kept.items()):
                try:
                    await self._tend(key, job, card)
                except ApiError as error:
                    _log.warning("service %s/%s: %s", *key, error.message)

    async def _tend(self, key: Key, job: ElasticJob, card: Card) -> None:
        """Apply what it is made of, and tell how it is."""
        if self._applied.get(key) != job.metadata.generation:
            await self._apply(job)
            self._applied[key] = job.metadata.generation
        try:
            found = (await self._api.get(DEPLOYMENTS, key[1], key[0])).status
        except ObjectNotFound:
            self._applied.pop(key, None)
            return
        has, ready = int(found.get("replicas") or 0), int(found.get("readyReplicas") or 0)
        suspended = bool(job.spec.get("suspend"))
        told = self._told(job, card, has, ready, suspended)
        if any(card.status.get(name) != value for name, value in told.items() if name != "conditions"):
            card.put(told, urgent=False)

    def _told(self, job: ElasticJob, card: Card, has: int, ready: int, suspended: bool) -> dict[str, Any]:
        sizes = (job.spec.get("service") or {}).get("replicas") or {"min": 1, "max": 1}
        text = f"{ready} of {has} replicas serve"
        generation = job.metadata.generation
        states = [("Running", ready > 0, "Service", text), (status.INVALID, False, "Accepted", "is a valid service")]
        return {
            "phase": "Suspended" if suspended else "Running" if ready else "Pending",
            "reason": "Service",
            "message": text,
            "workers": has,
            "ready": ready,
            "size": f"{has}/{sizes.get('min', 1)}..{sizes.get('max', 1)}",
            "observedGeneration": generation,
            "conditions": status.conditions(states, card.status.get("conditions") or (), generation, self._clock()),
        }

    async def _apply(self, job: ElasticJob) -> None:
        meta = job.metadata
        body = {
            "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid, "labels": dict(meta.labels)},
            "spec": job.spec,
        }
        kinds = await self._kinds()
        made = service_objects(body, kinds["HorizontalPodAutoscaler"] is HPAS, self._gpu_resource)
        for one in made:
            await self._api.patch(
                kinds[one["kind"]], meta.name, one, meta.namespace, how="apply", manager=_MANAGER, force=True
            )
        for kind in kinds.keys() - {one["kind"] for one in made}:
            with contextlib.suppress(ObjectNotFound):
                found = await self._api.get(kinds[kind], meta.name, meta.namespace)
                if any(owner.uid == meta.uid for owner in found.metadata.owner_references):
                    await self._api.delete(kinds[kind], meta.name, meta.namespace, uid=found.metadata.uid)

    async def _kinds(self) -> dict[str, Kind[Any]]:
        if self._has_v2 is None:
            self._has_v2 = await self._api.serves(HPAS)
        autoscalers = HPAS if self._has_v2 else HPAS_BEFORE_1_23
        return {"Deployment": DEPLOYMENTS, "Service": SERVICES, "HorizontalPodAutoscaler": autoscalers}
