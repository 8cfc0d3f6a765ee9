"""What is told of a job in its object's status, and how a job is known again from it. Pure.

No text is empty: some API servers take an empty text for none, and refuse the whole status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from stretto.core.estimate.curve import Curve
from stretto.jobs.model import Context, Job, Level, Worker
from stretto.kubernetes.fields import GROUP
from stretto.kubernetes.pods import JOB_LABEL
from stretto.server.book import Reasoned

PHASES = {
    "queued": "Pending",
    "running": "Running",
    "suspended": "Suspended",
    "succeeded": "Succeeded",
    "failed": "Failed",
    "cancelled": "Cancelled",
}
ENDED = frozenset({"Succeeded", "Failed", "Cancelled"})
INVALID = "Invalid"
_LONGEST = 4000

_NOT_KEPT = ("spec", "context", "workers", "helpers", "secret", "metrics")
"""What comes from the object, its pods and its secret."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A job at this moment."""

    job: Job
    generation: int
    """Of the object that it was read from."""
    reason: Reasoned
    target: int = 0
    ready: int = 0
    step: int = 0
    total: int | None = None
    checkpoint: tuple[int, float] | None = None
    """The step of the latest complete checkpoint, and when it was saved."""
    mistake: str = ""
    """What is wrong with the object as it is by now."""
    speeds: Mapping[str, Curve] = {}
    """What was measured of it, by device type."""


def describe(view: View, before: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """The whole status but for the coordinator's part. `before`: what is there, for the times of conditions."""
    job = view.job
    has = len(job.workers)
    waiting = view.reason.name if job.phase in ("queued", "suspended") else None
    told: dict[str, Any] = {
        "phase": PHASES[job.phase],
        "reason": token(view.reason.name),
        "message": _message(view),
        "waitingFor": waiting,
        "workers": has,
        "size": f"{has}/{job.min_workers}..{job.max_workers}",
        "ready": view.ready,
        "selector": f"{JOB_LABEL}={_own_name(job)}",
        "step": view.step,
        "resizes": job.resizes,
        "preemptions": job.preemptions,
        "migrations": job.migrations,
        "restarts": max(0, job.starts - 1),
        "failures": job.failures,
        "lostSeconds": round(job.lost_s),
        "observedGeneration": view.generation,
        "number": job.number,
        "accounts": {**accounts(job), "speeds": msgspec.to_builtins(view.speeds)},
    }
    if view.total is not None:
        told["totalSteps"] = view.total
    if view.checkpoint is not None:
        told["lastCheckpoint"] = {"step": view.checkpoint[0], "time": stamp(view.checkpoint[1])}
    for name, at_s in (("startTime", job.started_s), ("completionTime", job.ended_s)):
        if at_s is not None:
            told[name] = stamp(at_s)
    told["notBefore"] = stamp(job.not_before_s) if job.not_before_s > now_s else None
    told["conditions"] = conditions(_states(view), before.get("conditions") or (), view.generation, now_s)
    return told


def _message(view: View) -> str | None:
    """Why it is as it is; with the fault that it suffered last, until it has made progress again."""
    job = view.job
    if job.ended and job.message:
        return _short(job.message)
    fault = f"; it was tried again: {job.message}" if job.failures and job.message not in view.reason.text else ""
    return _short(view.reason.text + fault) or None


def refusal(text: str, before: Mapping[str, Any], generation: int, now_s: float) -> dict[str, Any]:
    """The status of an object that is no job."""
    states = [(INVALID, True, "Refused", text)]
    return {
        "phase": INVALID,
        "reason": "Refused",
        "message": _short(text),
        "waitingFor": None,
        "observedGeneration": generation,
        "conditions": conditions(states, before.get("conditions") or (), generation, now_s),
    }


def accounts(job: Job) -> dict[str, Any]:
    """What of a job can be known from nowhere else."""
    told: dict[str, Any] = msgspec.to_builtins(job)
    kept = {name: value for name, value in told.items() if name not in _NOT_KEPT and value not in (None, "")}
    return {**kept, "present": [worker.name for worker in job.workers]}


def is_past(kept: Mapping[str, Any], worker: Worker) -> bool:
    """Whether the end of a worker is in the accounts though its pod is still there."""
    is_new = int(worker.name[1:]) >= kept.get("launches", 0)
    return "present" in kept and not is_new and worker.name not in kept["present"]


def missing(kept: Mapping[str, Any], workers: Sequence[Worker]) -> list[Worker]:
    """Those that were there, beside others that still are, and have gone without a trace."""
    names = {worker.name for worker in workers}
    gone = [name for name in kept.get("present", ()) if name not in names] if workers else []
    return [msgspec.structs.replace(workers[0], name=name, launch=f"{kept['number']}.{name}.gone") for name in gone]


def known(
    kept: Mapping[str, Any], spec: Mapping[str, Any], level: Level, secret: str, workers: Sequence[Worker]
) -> Job:
    """The job again, from its accounts."""
    found = msgspec.convert(
        {**kept, "spec": dict(spec), "context": {"cwd": "/"}, "level": level, "secret": secret}, Job, strict=False
    )
    phase = found.phase
    if workers:
        phase = "running"
    elif phase == "running":
        phase = "queued"
    # A pod may have been made after the last time that this was written.
    launches = max([found.launches, *(int(worker.name[1:]) + 1 for worker in workers)])
    return msgspec.structs.replace(
        found, workers=tuple(workers), phase=phase, launches=launches, context=Context(cwd="/")
    )


def _states(view: View) -> list[tuple[str, bool, str, str]]:
    job, reason = view.job, view.reason
    states = [("Running", job.phase == "running", token(reason.name), reason.text)]
    if job.ended:
        word = "Ended" if job.phase == "succeeded" else "Failed" if job.phase == "failed" else "Cancelled"
        states = [("Running", False, word, "has ended")]
        states.append(("Complete", job.phase == "succeeded", word, job.message or "has ended well"))
        states.append(("Failed", job.phase == "failed", word, job.message))
    if view.mistake:
        states.append((INVALID, True, "Refused", view.mistake))
    else:
        states.append((INVALID, False, "Accepted", "is a valid job"))
    return states


def conditions(
    states: Iterable[tuple[str, bool, str, str]], before: Iterable[Mapping[str, Any]], generation: int, now_s: float
) -> list[dict[str, Any]]:
    """Each with the time since when it is as it is."""
    earlier = {condition.get("type"): condition for condition in before}
    told = []
    for kind, holds, reason, message in states:
        status = "True" if holds else "False"
        was = earlier.get(kind)
        same = was is not None and was.get("status") == status
        since = was["lastTransitionTime"] if was is not None and same else stamp(now_s)
        told.append(
            {
                "type": kind, "status": status, "reason": reason, "message": _short(message) or reason,
                "lastTransitionTime": since, "observedGeneration": generation,
            }
        )  # fmt: skip
    return told


def token(name: str) -> str:
    """A reason as Kubernetes writes them: `no-room` is `NoRoom`."""
    return "".join(part[:1].upper() + part[1:] for part in name.replace("_", "-").split("-")) or "Unknown"


def stamp(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def qualified(namespace: str, name: str) -> str:
    """The name of a job among all of the cluster."""
    return f"{namespace}/{name}"


def _own_name(job: Job) -> str:
    return job.name.rpartition("/")[2]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}"


SECRET_LABEL = {f"{GROUP}/secret": "worker"}
