"""What happens to jobs, as Kubernetes events: `kubectl describe elasticjob` shows them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any

from stretto.jobs import events as e
from stretto.jobs.model import Job
from stretto.kubernetes.client import Api
from stretto.kubernetes.fields import API_VERSION, KIND
from stretto.kubernetes.kinds import EVENTS
from stretto.kubernetes.problems import ApiError
from stretto.kubernetes.register import Register
from stretto.kubernetes.status import stamp, token

_log = logging.getLogger(__name__)
_MOST_WAITING = 1000


class Announcer:
    """A listener of the book. Events are a courtesy: what cannot be written is dropped, and holds nobody up."""

    def __init__(self, api: Api, register: Register, identity: str, clock: Callable[[], float]) -> None:
        self._api, self._register, self._identity, self._clock = api, register, identity, clock
        self._queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(_MOST_WAITING)

    def __call__(self, recorded: e.Recorded, job: Job | None) -> None:
        entry = self._register.get(job.number) if job is not None else None
        told = _told(recorded.event)
        if entry is None or told is None or self._queue.full():
            return
        kind, reason, message = told
        meta = entry.object.metadata
        about = {
            "apiVersion": API_VERSION, "kind": KIND, "name": meta.name, "namespace": meta.namespace, "uid": meta.uid,
        }  # fmt: skip
        now = stamp(self._clock())
        body = {
            "metadata": {"name": f"{meta.name}.{secrets.token_hex(8)}", "namespace": meta.namespace},
            "involvedObject": about,
            "type": kind,
            "reason": reason,
            "message": message[:1000],
            "source": {"component": "stretto-controller"},
            "reportingComponent": "stretto.dev/controller",
            "reportingInstance": self._identity,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._queue.put_nowait((meta.namespace, body))

    async def run(self) -> None:
        while True:
            namespace, body = await self._queue.get()
            try:
                await self._api.create(EVENTS, body, namespace)
            except ApiError as error:
                _log.debug("event: %s", error.message)


def _told(event: e.Event) -> tuple[str, str, str] | None:
    match event:
        case e.Resized(workers=workers, before=before, reason=reason, text=text):
            return "Normal", token(reason), f"{before} → {workers} workers: {text}"
        case e.Retried(text=text):
            return "Warning", "Retried", text
        case e.Interrupted(lost_s=lost_s, text=text):
            return "Warning" if lost_s else "Normal", "Interrupted", f"{text}: {lost_s:.0f} s of its work are lost"
        case e.Stuck(text=text, moves=moves):
            return "Normal" if moves else "Warning", "WorkerMoves" if moves else "WorkerStuck", text
        case e.Warned(text=text):
            return "Warning", "Warned", text
        case e.Ended(phase=phase, message=message):
            kind = "Warning" if phase == "failed" else "Normal"
            return kind, token(phase), message or f"has {phase}"
        case e.Exited(worker=worker, how=how, status=status, text=text) if how != "exited" or status:
            return "Warning", "WorkerEnded", f"{worker}: {how} {status} {text}".strip()
    return None
