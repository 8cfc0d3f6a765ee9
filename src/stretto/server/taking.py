"""Why a job that would have gone on is stopped: for others, by a person's own act, with its node, by a fault.

Found out when its workers are asked to leave, and remembered with them, so that whoever sees them end tells the same,
be it the next server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from stretto.backends.protocol import Exit
from stretto.jobs import events as e
from stretto.jobs.model import Taken, Worker
from stretto.server.book import Active
from stretto.server.drivers.base import Fault, Judgement


def taken(
    active: Active, workers: Sequence[str], drained: AbstractSet[str], drained_by: Mapping[str, str], *, failing: bool
) -> Taken | None:
    """Why it gives up these workers; None: it would not have gone on."""
    job = active.job
    if failing or job.wish == "cancel":
        return None
    for_jobs: tuple[str, ...] = getattr(active.ground, "jobs", ())
    if act := _own_act(active, for_jobs):
        return Taken("asked", act)
    left = {worker.seat.node for worker in job.workers if worker.name in workers} & drained
    if left:
        node = min(left)
        return Taken("node", f"{node} drained" + (f" by {by}" if (by := drained_by.get(node, "")) else ""))
    if for_jobs:
        return Taken("preempted", f"stopped for {', '.join(for_jobs)}", for_jobs)
    if not active.target:
        return Taken("preempted", "stopped for others")
    same = len(active.target) == _size(active)
    return Taken("preempted", "restarted on other devices" if same else "restarted at another size")


def accident(worker: Worker, exit: Exit, fault: Judgement) -> Taken | None:
    """Why a job that nobody here has stopped has lost its last worker; None: it was nobody's doing but its own."""
    if isinstance(fault, Fault):
        return Taken("node", f"{fault.node} lost") if fault.node else Taken("machine", fault.text.partition(":")[0])
    return Taken("node", f"asked to leave {worker.seat.node}") if exit.asked else None


def interrupted(why: Taken, lost_s: float) -> e.Interrupted:
    return e.Interrupted(cause=why.cause, lost_s=lost_s, text=why.text, by=why.by)


def _own_act(active: Active, for_jobs: Sequence[str]) -> str:
    """What a person has done that stops it; empty: it is not that."""
    job = active.job
    if job.wish == "suspend":
        return job.act or "suspended"
    if job.node and not for_jobs:
        return job.act or "migrated"
    return job.act if job.act and not job.node and _size(active) not in active.request.sizes() else ""


def _size(active: Active) -> int:
    return sum(not worker.leaving for worker in active.job.workers)
