"""Services first: they get the replicas their load asks for before any training job gets a worker.

The policy then sees only the training jobs and the room that is left.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

_JOB_COLUMNS = (
    "job", "klass", "submit_s", "priority", "deadline_s", "requested", "min_workers", "max_workers", "width",
    "fixed_milli", "demand", "curve", "resize_s", "start_s", "is_service", "wanted", "workers", "pool", "placed",
    "remaining", "remaining_sd", "done", "ran_s", "gpu_s", "waited_s", "started_s", "changed_s", "restarts",
)  # fmt: skip


def only(view: Snapshot, keep: BoolArray, capacity: IntArray | None = None) -> Snapshot:
    """The snapshot of some of the jobs, optionally with other capacity."""
    if capacity is None and keep.all():
        return view
    columns = {name: getattr(view, name)[keep] for name in _JOB_COLUMNS}
    for name in ("step", "reach", "lost_s", "fragile", "unproven", "preemptible", "explores", "guess"):
        columns[name] = None if getattr(view, name) is None else getattr(view, name)[keep]
    return msgspec.structs.replace(view, capacity=view.capacity if capacity is None else capacity, **columns)


def first(view: Snapshot, train: Callable[[Snapshot], Decision]) -> Decision:
    """Serve the services by priority and age, then let `train` decide on the rest."""
    n = len(view)
    workers, pool = np.zeros(n, np.int64), np.zeros(n, np.int64)
    reason, detail = np.zeros(n, np.int64), np.zeros((n, 2))
    free = view.capacity.copy()
    for j in np.lexsort((view.job, -view.priority)).tolist():
        if view.is_service[j]:
            wish = int(np.clip(view.wanted[j], view.min_workers[j], view.max_workers[j]))
            workers[j], pool[j] = _replicas(view, j, wish, free)
            if workers[j]:
                free[pool[j]] -= workers[j] * view.width[j] + view.fixed_milli[j]
                reason[j], detail[j, 0] = Reason.SERVICE_LOAD, wish
            else:
                least = view.min_workers[j] * view.width[j] + view.fixed_milli[j]
                reason[j], detail[j] = Reason.NO_ROOM, (least / GPU, free[pool[j]] / GPU)
    training = ~view.is_service
    rest = train(only(view, training, free))
    workers[training], pool[training] = rest.workers, rest.pool
    reason[training], detail[training] = rest.reason, rest.detail
    _say_who_is_in_the_way(view, free, reason, detail)
    rejected = None
    if rest.rejected is not None:
        rejected = np.zeros(n, np.bool_)
        rejected[training] = rest.rejected
    return Decision(
        workers=workers, pool=pool, reason=reason, detail=detail, memory=rest.memory, wake_s=rest.wake_s,
        rejected=rejected,
    )  # fmt: skip


def _replicas(view: Snapshot, j: int, wish: int, free: IntArray) -> tuple[int, int]:
    """Workers of a service, and its pool: where it is if all it wants fits there, otherwise the roomiest."""
    old, width, fixed = int(view.pool[j]), int(view.width[j]), int(view.fixed_milli[j])
    pool = old if old >= 0 and wish * width + fixed <= free[old] else int(np.argmax(free))
    got = min(wish, (int(free[pool]) - fixed) // max(width, 1))
    return (got if got >= view.min_workers[j] else 0), pool


def _say_who_is_in_the_way(view: Snapshot, free: IntArray, reason: IntArray, detail: FloatArray) -> None:
    """A job too large for what services leave is not too large for the cluster: it gives way to them."""
    need = view.min_workers * view.width + view.fixed_milli
    yields = (reason == Reason.TOO_LARGE) & (need <= view.total_milli)
    reason[yields] = Reason.YIELDS_TO_SERVICE
    detail[yields] = (view.total_milli - int(free.sum())) / GPU, 0.0
