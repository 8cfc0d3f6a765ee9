"""What an event makes of a job. The one place where a job's state changes.

Events that do not fit are not errors here: a worker that exited twice, a launch after the end. The control plane does
not write such events; were one written, applying it must still give the same job everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from stretto.jobs import events as e
from stretto.jobs.model import Job, Worker

_DEVICE = 1000
_MOST_TOLD = 8
"""So many different losses are told one by one."""
_EARLIER = "earlier"


def apply(job: Job | None, event: e.Event, at_s: float) -> Job:
    """The job after the event. Only `Submitted` makes one out of nothing."""
    if isinstance(event, e.Submitted):
        return event.job
    if job is None:
        raise ValueError(f"the first event of a job is its submission, not {type(event).__name__}")
    match event:
        case e.Wished():
            return _wished(job, event, at_s)
        case e.Scaled(min_workers=low, max_workers=high):
            return _with(job, min_workers=low, max_workers=high, act=f"scaled by {event.by}")
        case e.Moved(node=node):
            return _with(job, node=node, act=f"migrated by {event.by}" if node else "")
        case e.Launched():
            return _launched(job, event, at_s)
        case e.Running(worker=name, launch=launch, pid=pid, began_s=began_s):
            return _changed(job, name, launch, pid=pid, began_s=began_s or at_s)
        case e.Leaving(worker=name, why=why, preempted=preempted, taken=taken):
            return _changed(job, name, None, leaving=why, preempted=preempted, taken=taken)
        case e.Exited(worker=name, launch=launch, how=how, status=status):
            return _exited(job, name, launch, how == "exited" and status == 0, at_s)
        case e.Retried(not_before_s=not_before_s, text=text, afresh=afresh):
            return _with(job, failures=1 if afresh else job.failures + 1, not_before_s=not_before_s, message=text)
        case e.Kept(keeps=keeps, start_s=start_s):
            return _with(job, keeps=keeps, start_s=start_s or job.start_s)
        case e.Interrupted(lost_s=lost_s, text=text):
            return _interrupted(job, lost_s, text)
        case e.Progressed():
            return _progressed(job, event)
        case e.Warned(text=text):
            return _with(job, message=text)
        case e.Migrated():
            return _with(job, migrations=job.migrations + 1)
        case e.Ended(phase=phase, message=message, exit_code=code):
            job = accounted(job, at_s)
            return _with(job, phase=phase, message=message, exit_code=code, ended_s=at_s, workers=(), helpers=())
        case e.Resized(workers=workers, before=before):
            return _with(job, resizes=job.resizes + bool(workers and before))
        case e.Noted() | e.Stuck():
            return job


def fold(history: Iterable[tuple[float, e.Event]]) -> Job | None:
    """The job that a whole history gives."""
    job: Job | None = None
    for at_s, event in history:
        job = apply(job, event, at_s)
    return job


def _wished(job: Job, event: e.Wished, at_s: float) -> Job:
    """A job with workers gives them up first; one without is at once where it is wanted."""
    job = _with(accounted(job, at_s), wish=event.wish, message=event.why or job.message)
    if event.wish == "suspend":
        job = _with(job, act=event.why or f"suspended by {event.by}")
    if event.wish == "run":
        job = _with(job, not_before_s=0.0, failures=0, act="")
    if event.wish == "run" and job.phase == "suspended":
        return _with(job, phase="queued")
    return _with(job, phase="suspended") if event.wish == "suspend" and job.phase == "queued" else job


def _launched(job: Job, event: e.Launched, at_s: float) -> Job:
    if job.ended or job.worker(event.worker) is not None:
        again = event.again and not job.ended
        return _changed(job, event.worker, None, launch=event.launch) if again else job
    worker = Worker(
        name=event.worker, launch=event.launch, seat=event.seat, launched_s=at_s, member=event.member, port=event.port
    )
    if event.helper:
        return _with(job, helpers=(*job.helpers, worker))
    first = not job.workers
    job = accounted(job, at_s)
    return _with(
        job,
        workers=(*job.workers, worker),
        launches=job.launches + 1,
        phase="running",
        started_s=at_s if job.started_s is None else job.started_s,
        starts=job.starts + first,
        act="" if first else job.act,
        finished=0 if first else job.finished,
    )


def _exited(job: Job, name: str, launch: str, well: bool, at_s: float) -> Job:
    gone = job.worker(name)
    if gone is None or gone.launch != launch:
        return job
    if gone in job.helpers:
        return _with(job, helpers=tuple(helper for helper in job.helpers if helper is not gone))
    job = accounted(job, at_s)
    finished = job.finished + (well and not gone.leaving)
    job = _with(job, workers=tuple(worker for worker in job.workers if worker is not gone), finished=finished)
    if job.workers or job.ended:
        return job
    if job.wish == "suspend":
        return _with(job, phase="suspended")
    return _with(job, phase="queued", preemptions=job.preemptions + (gone.preempted and job.wish == "run"))


def _interrupted(job: Job, lost_s: float, text: str) -> Job:
    if not lost_s:
        return job
    lost = {**{said: s for said, s in job.lost.items() if said != text}, text: job.lost.get(text, 0.0) + lost_s}
    while len(lost) > _MOST_TOLD:
        first, second, *_ = lost
        lost = {_EARLIER: lost.pop(first) + lost.pop(second), **lost}
    return _with(job, lost_s=job.lost_s + lost_s, lost=lost)


def _progressed(job: Job, event: e.Progressed) -> Job:
    return _with(
        job,
        steps=event.steps,
        total_steps=event.total_steps,
        metrics=event.metrics,
        paused_s=event.paused_s,
        failures=0 if event.steps > job.steps else job.failures,
    )


def accounted(job: Job, at_s: float) -> Job:
    """The job with its times counted up to this moment."""
    span_s = max(0.0, at_s - job.changed_s)
    held = len(job.workers)
    return _with(
        job,
        changed_s=at_s,
        ran_s=job.ran_s + (span_s if held else 0.0),
        waited_s=job.waited_s + (span_s if job.phase == "queued" else 0.0),
        device_s=job.device_s + span_s * held * job.width_milli / _DEVICE,
    )


def _changed(job: Job, name: str, launch: str | None, /, **changes: object) -> Job:
    workers, helpers = (
        tuple(
            msgspec.structs.replace(worker, **changes)
            if worker.name == name and launch in (None, worker.launch)
            else worker
            for worker in some
        )
        for some in (job.workers, job.helpers)
    )
    return _with(job, workers=workers, helpers=helpers)


def _with(job: Job, **changes: object) -> Job:
    return msgspec.structs.replace(job, **changes)
