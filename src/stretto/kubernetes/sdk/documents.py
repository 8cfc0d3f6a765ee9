"""An ElasticJob with its pods, and the events about it, as the documents that a server's client gives. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from stretto.client.documents import ENDED, Event, Job, Why
from stretto.errors import SpecError
from stretto.kubernetes import elastic_job, pods
from stretto.kubernetes.fields import SERVICE_LABEL
from stretto.kubernetes.kinds import Kind
from stretto.kubernetes.model import ElasticJob, Meta, Pod
from stretto.kubernetes.status import INVALID, PHASES
from stretto.spec.model import JobFile

ACTIVE = ("queued", "running", "suspended", "invalid")
"""Phases of jobs that have not ended. `invalid` is one that a server does not have: there such a job is never accepted,
here its object exists, and waits to be corrected."""

_WORDS = {told: word for word, told in PHASES.items()} | {INVALID: "invalid"}
_UNSEEN = "no controller has looked at it yet"
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COUNTED = ("starts", "resizes", "preemptions", "migrations", "failures")
_SPANS = ("waited_s", "ran_s", "device_s", "paused_s")


class _About(msgspec.Struct, rename="camel", frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""


class CoreEvent(msgspec.Struct, rename="camel", frozen=True):
    """A core/v1 Event. Newer senders give `eventTime` in place of the two stamps."""

    metadata: Meta
    involved_object: _About = _About()
    type: str = ""
    reason: str = ""
    message: str = ""
    count: int | None = None
    first_timestamp: datetime | None = None
    last_timestamp: datetime | None = None
    event_time: datetime | None = None
    reporting_component: str = ""


CORE_EVENTS = Kind("", "v1", "events", CoreEvent)


def job(found: ElasticJob, own: Iterable[Pod] = ()) -> Job:
    """`own`: its pods, as `pods_of` sorts them out."""
    meta, told = found.metadata, found.status
    kept = told.get("accounts") or {}
    file = _file(found)
    now, text, message = phase(found), str(told.get("message") or ""), str(kept.get("message") or "")
    ended = now in ENDED
    if not told:
        text = _UNSEEN
    low, high = sizes(found.spec)
    return Job(
        id=f"{meta.namespace}/{meta.name}",
        number=int(told.get("number") or 0),
        name=meta.name,
        namespace=meta.namespace,
        uid=meta.uid,
        user=meta.namespace,
        phase=now,
        wish=_wish(found),
        level=level(found),
        queue=str(found.spec.get("queue") or "default"),
        priority=_priority(found),
        labels=dict(meta.labels),
        message=text if ended or now == "invalid" else message,
        exit_code=kept.get("exit_code"),
        submitted_s=_seconds(meta.creation_timestamp) or 0.0,
        started_s=_stamp(told.get("startTime")),
        ended_s=_stamp(told.get("completionTime")),
        workers=[worker(pod) for pod in own if not pod.is_terminal],
        target=0 if ended else int(told.get("workers") or 0),
        min_workers=low,
        max_workers=high,
        reason=_word(told.get("reason")),
        text="" if ended else text,
        steps=int(told.get("step") or 0),
        total_steps=told.get("totalSteps"),
        rate=0.0,
        rate_timed=False,
        speeds=_speeds(kept.get("speeds")),
        eta_s=None,
        expected=None,
        metrics={},
        **{name: float(kept.get(name) or 0.0) for name in _SPANS},
        **{name: int(kept.get(name) or told.get(name) or 0) for name in _COUNTED},
        keeps=bool(kept.get("keeps")),
        lost_s=float(kept.get("lost_s") or 0.0),
        lost=dict(kept.get("lost") or {}),
        stuck=[],
        spec=_shown(found, file),
        withheld=False,
    )


def _speeds(kept: Any) -> list[dict[str, Any]]:
    """As the API of a server tells them; what cannot be read is left out."""
    if not kept:
        return []
    import msgspec

    from stretto.core.estimate.curve import Curve, measured

    try:
        curves = msgspec.convert(kept, dict[str, Curve], strict=False)
    except msgspec.ValidationError:
        return []
    return [
        {"pool": pool, "workers": size.workers, "rate": size.rate, "spread": size.spread, "steps": round(size.steps)}
        for pool, curve in sorted(curves.items())
        for size in measured(curve)
    ]


def phase(found: ElasticJob) -> str:
    told = found.status.get("phase")
    if not told:
        return "suspended" if found.spec.get("suspend") else "queued"
    return _WORDS.get(str(told), str(told).lower())


def deleted(before: Job, at_s: float) -> Job:
    """What a job is whose object has gone. One that had not ended ends with it."""
    if before.ended:
        return before
    gone = {"phase": "cancelled", "wish": "cancel", "workers": [], "target": 0, "ended_s": at_s, "text": ""}
    return Job({**before, **gone, "message": "its object was deleted"})


def worker(pod: Pod) -> dict[str, Any]:
    meta, state = pod.metadata, pod.status
    return {
        "name": worker_name(pod),
        "pod": meta.name,
        "node": pod.spec.node_name or meta.annotations.get(pods.NODE_NOTE, ""),
        "devices": [],
        "pid": 0,
        "leaving": "its pod is being deleted" if meta.is_leaving else "",
        "launched_s": _seconds(meta.creation_timestamp) or 0.0,
        "joined": pod.is_running,
        "state": _trouble(pod) or state.phase.lower() or "pending",
    }


def worker_name(pod: Pod) -> str:
    """`w3`; a replica of a service, which has no number, goes by its pod's name."""
    return pod.metadata.labels.get(pods.WORKER_LABEL) or pod.metadata.name


def owner_name(pod: Pod) -> str:
    """The job that its labels name."""
    labels = pod.metadata.labels
    return labels.get(pods.JOB_LABEL) or labels.get(SERVICE_LABEL) or ""


def selector(found: ElasticJob) -> str:
    label = SERVICE_LABEL if found.spec.get("service") else pods.JOB_LABEL
    return f"{label}={found.metadata.name}"


def pods_of(found: ElasticJob, among: Iterable[Pod]) -> list[Pod]:
    """Its pods in the order of their launch, those of an earlier object of the same name left out."""
    is_service, meta = bool(found.spec.get("service")), found.metadata
    label = SERVICE_LABEL if is_service else pods.JOB_LABEL
    own = [
        pod
        for pod in among
        if (pod.metadata.namespace, pod.metadata.labels.get(label)) == (meta.namespace, meta.name)
        and (is_service or any(owner.uid == meta.uid for owner in pod.metadata.owner_references))
    ]
    return sorted(own, key=_launch_order)


def sizes(spec: Mapping[str, Any]) -> tuple[int, int]:
    """Between how many workers it may run, or how many replicas a service has."""
    service = spec.get("service")
    told = (service.get("replicas") if isinstance(service, Mapping) else spec.get("workers")) or {}
    return int(told.get("min") or 1), int(told.get("max") or told.get("min") or 1)


def level(found: ElasticJob) -> str:
    """As it was taken in: scaling does not change it."""
    if found.spec.get("service"):
        return "service"
    low, high = sizes(found.spec)
    kept = found.status.get("accounts") or {}
    return str(kept.get("level") or found.spec.get("level") or ("elastic" if low < high else "rigid"))


def why(found: ElasticJob, own: Iterable[Pod]) -> Why:
    told = found.status
    shown = job(found, own)
    facts: dict[str, Any] = {
        "min_workers": shown.min_workers,
        "max_workers": shown.max_workers,
        "ready": told.get("ready"),
        "waiting_for": told.get("waitingFor"),
        "not_before": told.get("notBefore"),
        "checkpoint": _checkpoint(told),
        "failures": shown.failures or None,
    }
    facts |= {worker_name(pod): trouble for pod in own if (trouble := _trouble(pod))}
    return Why(
        job=shown.id,
        name=shown.name,
        phase=shown.phase,
        workers=len(shown.workers),
        target=shown.target,
        reason=shown.reason,
        text=shown.text or shown.message,
        policy="",
        facts={name: value for name, value in facts.items() if value not in (None, "")},
        conditions=list(told.get("conditions") or ()),
    )


def event(found: CoreEvent) -> Event:
    """`text` is the whole of it for people; `kind` is `ended` for a job's last one, else the reason."""
    at = found.last_timestamp or found.event_time or found.first_timestamp or found.metadata.creation_timestamp
    about = found.involved_object
    reason = _word(found.reason)
    body = {
        "kind": "ended" if reason in ENDED else reason,
        "type": found.type,
        "reason": found.reason,
        "text": found.message,
        "count": found.count or 1,
        "by": found.reporting_component,
    }
    return Event(
        seq=sequence(found.metadata),
        at_s=_seconds(at) or 0.0,
        job=f"{about.namespace}/{about.name}",
        text=f"{found.reason}: {found.message}",
        event=body,
    )


def sequence(meta: Meta) -> int:
    """Versions of objects of one kind ascend."""
    return int(meta.resource_version) if meta.resource_version.isdecimal() else 0


def _trouble(pod: Pod) -> str:
    """Why it does not start, at once: whether it mends itself is for the controller to wait for."""
    return pods.trouble(pod, patient=False)


def _wish(found: ElasticJob) -> str:
    if found.metadata.is_leaving:
        return "cancel"
    return "suspend" if found.spec.get("suspend") else "run"


def _priority(found: ElasticJob) -> int:
    given = found.spec.get("priority")
    return int(given) if given is not None else 80 if found.spec.get("service") else 50


def _file(found: ElasticJob) -> JobFile | None:
    """None when it is not a valid job, or not one that this version understands."""
    meta = found.metadata
    about = {"name": meta.name, "namespace": meta.namespace, "labels": dict(meta.labels)}
    try:
        return elastic_job.job_file({"metadata": about, "spec": found.spec})
    except SpecError:
        return None


def _shown(found: ElasticJob, file: JobFile | None) -> dict[str, Any]:
    """The job file; its variables may hold secrets, and are in no answer of a server either."""
    spec = file.model_dump(mode="json") if file is not None else dict(found.spec)
    return {name: value for name, value in spec.items() if name not in ("env", "template")}


def _checkpoint(told: Mapping[str, Any]) -> str:
    saved = told.get("lastCheckpoint") or {}
    return f"step {saved.get('step')} at {saved.get('time')}" if saved else ""


def _launch_order(pod: Pod) -> tuple[int, str]:
    number = pod.metadata.labels.get(pods.WORKER_LABEL, "")[1:]
    return int(number) if number.isdecimal() else 0, pod.metadata.name


def _word(token: object) -> str:
    """`NoRoom` is `no-room`, as a server says it."""
    return _HUMP.sub("-", str(token or "")).lower()


def _stamp(text: object) -> float | None:
    return _seconds(datetime.fromisoformat(text)) if isinstance(text, str) and text else None


def _seconds(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
