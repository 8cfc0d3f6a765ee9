"""Services: what they are made of is applied and looked after here; where replicas run is kube-scheduler's affair."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stretto.errors import StrettoError
from stretto.kubernetes import status
from stretto.kubernetes.client import Api
from stretto.kubernetes.keeping import Card
from stretto.kubernetes.kinds import DEPLOYMENTS, HPAS, HPAS_BEFORE_1_23, SERVICES, Kind
from stretto.kubernetes.model import ElasticJob
from stretto.kubernetes.problems import ApiError, ObjectNotFound, Unreachable
from stretto.kubernetes.register import Key
from stretto.kubernetes.services import service_objects

_log = logging.getLogger(__name__)

_LOOK_S = 5.0
_MANAGER = "stretto-controller"
_REFUSED = "Refused"


class _Kept(msgspec.Struct):
    job: ElasticJob
    card: Card
    applied: int = 0
    """The generation that was applied last."""
    refused: int = 0
    """The generation that is no service."""


class ServiceKeeper:
    def __init__(self, api: Api, gpu_resource: str, clock: Callable[[], float]) -> None:
        self._api, self._gpu_resource, self._clock = api, gpu_resource, clock
        self._kept: dict[Key, _Kept] = {}
        self._has_v2: bool | None = None
        self._woken = asyncio.Event()

    def put(self, job: ElasticJob, card: Card) -> None:
        """A service, or a newer version of one."""
        kept = self._kept.get(job.metadata.key)
        if kept is None or kept.card is not card:
            self._kept[job.metadata.key] = _Kept(job, card)
        elif kept.job.metadata.generation == job.metadata.generation:
            return
        else:
            kept.job = job
        self._woken.set()

    def remove(self, key: Key) -> None:
        """Its objects go with their owner."""
        self._kept.pop(key, None)

    def card(self, key: Key) -> Card | None:
        return self._kept[key].card if key in self._kept else None

    async def run(self) -> None:
        """Until cancelled. What is wrong with one service is told in its status, and does not concern the others."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._woken.wait()
            self._woken.clear()
            for key, kept in list(self._kept.items()):
                try:
                    await self._tend(kept, kept.job)
                except Unreachable as error:
                    _log.warning("service %s/%s: %s", *key, error.message)
                except StrettoError as error:
                    self._refuse(kept, kept.job, error)
                except Exception:
                    _log.exception("service %s/%s could not be looked after", *key)

    async def _tend(self, kept: _Kept, job: ElasticJob) -> None:
        """Apply what it is made of, and tell how it is."""
        meta, trouble = job.metadata, ""
        if kept.refused == meta.generation:
            return
        if kept.applied != meta.generation:
            try:
                await self._apply(job)
                kept.applied = meta.generation
            except Unreachable:
                raise
            except ApiError as error:
                # Replicas of an earlier version may serve all the same; it is tried again with every look.
                trouble = f"the API server refuses what it is made of: {error.message}"
        try:
            found = (await self._api.get(DEPLOYMENTS, meta.name, meta.namespace)).status
        except ObjectNotFound:
            found, kept.applied = {}, 0
        self._tell(kept, job, self._told(job, kept.card, found, trouble))

    def _refuse(self, kept: _Kept, job: ElasticJob, error: StrettoError) -> None:
        """What is wrong with the object itself stays wrong until it is changed."""
        generation = job.metadata.generation
        if not isinstance(error, ApiError):
            kept.refused = generation
        self._tell(kept, job, status.refusal(error.message, kept.card.status, generation, self._clock()))

    def _tell(self, kept: _Kept, job: ElasticJob, told: dict[str, Any]) -> None:
        before, meta = kept.card.status, job.metadata
        if int(before.get("observedGeneration") or 0) > meta.generation:
            return  # A later version was refused, and that is what there is to tell.
        if any(before.get(name) != value for name, value in told.items() if name != "conditions"):
            if told["reason"] == _REFUSED:
                _log.warning("service %s/%s: %s", *meta.key, told["message"])
            kept.card.put(told, urgent=told["reason"] == _REFUSED)

    def _told(self, job: ElasticJob, card: Card, found: Mapping[str, Any], trouble: str) -> dict[str, Any]:
        has, ready = int(found.get("replicas") or 0), int(found.get("readyReplicas") or 0)
        sizes = (job.spec.get("service") or {}).get("replicas") or {"min": 1, "max": 1}
        text = f"{ready} of {has} replicas serve" + (f"; {trouble}" if trouble else "")
        reason = _REFUSED if trouble else "Service"
        generation = job.metadata.generation
        states = [("Running", ready > 0, reason, text), (status.INVALID, False, "Accepted", "is a valid service")]
        return {
            "phase": "Suspended" if job.spec.get("suspend") else "Running" if ready else "Pending",
            "reason": reason,
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
