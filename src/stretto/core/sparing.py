"""A start that was just made stands for a moment: equals that come right after it do not undo it.

Where jobs come in a burst, every one of them makes the policy think again; a job that is started by one decision and
stopped by the next has got nothing, and its script was ended before it could so much as listen. So nobody is stopped
within a second of its start for jobs that are no more urgent. Those wait that long, and then everybody is thought of
again, once.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot

FIRST_S = 1.0
"""So long nobody is stopped for an equal after its start."""


def spare(view: Snapshot, decision: Decision) -> Decision:
    """The decision without the stops of jobs that have just been started, as far as what jobs that are no more urgent
    were given in it makes room for them."""
    just = _just_started(view) & _undone(view, decision) & ~_gives_way(view, decision)
    if not just.any():
        return decision
    workers, pool = decision.workers.copy(), decision.pool.copy()
    reason, detail = decision.reason.copy(), decision.detail.copy()
    stays = np.zeros(len(view), np.bool_)
    for j in _urgent_first(view, just):
        back = _for(view, j, workers, pool)
        if back is None:
            continue
        for i in back:
            if view.workers[i]:
                reason[i], detail[i] = Reason.CUT_TO_ROOM, (view.workers[i], workers[i])
            else:
                reason[i], detail[i] = Reason.NO_ROOM, (workers[i] * view.width[i] / GPU, 0.0)
            workers[i] = view.workers[i]
        workers[j], pool[j] = view.workers[j], view.pool[j]
        reason[j], detail[j, 0], stays[j] = Reason.JUST_STARTED, view.now_s - view.changed_s[j], True
    nodes = decision.nodes
    if nodes is not None:
        nodes = np.where((workers != decision.workers)[:, None], view.placed, nodes)
    again_s = float((view.changed_s[stays] + FIRST_S).min(initial=np.inf))
    return msgspec.structs.replace(
        decision, workers=workers, pool=pool, reason=reason, detail=detail, nodes=nodes,
        wake_s=min(decision.wake_s, again_s),
    )  # fmt: skip


def _just_started(view: Snapshot) -> BoolArray:
    """Who has its workers for a moment, where starts cost something. Not who has lost some of them already."""
    allowed = (view.workers >= view.min_workers) & (view.workers <= view.max_workers)
    whole = view.placed.sum(axis=1) >= view.workers if view.placed.shape[1] else np.ones(len(view), np.bool_)
    # As `wake_s` is reckoned: what it is woken for must be so then.
    young = (view.now_s < view.changed_s + FIRST_S) & (view.start_s > 0)
    just: BoolArray = (view.workers > 0) & ~view.is_service & allowed & whole & young
    return just


def _undone(view: Snapshot, decision: Decision) -> BoolArray:
    """Whose workers would all end: also by a resize, where that is a stop and a start."""
    resized = (decision.workers != view.workers) & (view.resize_s >= view.start_s)
    undone: BoolArray = (decision.workers == 0) | resized
    return undone


def _gives_way(view: Snapshot, decision: Decision) -> BoolArray:
    """Who is less urgent than somebody who gets something now, and may need its place."""
    gets = decision.workers > view.workers
    most = view.priority[gets].max(initial=np.iinfo(np.int64).min)
    gives: BoolArray = (view.priority < most) | (gets & view.is_service).any()
    return gives


def _urgent_first(view: Snapshot, some: BoolArray) -> list[int]:
    at = np.flatnonzero(some)
    order: list[int] = at[np.lexsort((view.job[at], -view.priority[at]))].tolist()
    return order


def _for(view: Snapshot, j: int, workers: IntArray, pool: IntArray) -> list[int] | None:
    """Whose starts and growth must wait so that it can stay: the least urgent, then the latest. None: it cannot."""
    short = _needs(view, j, int(view.workers[j])) - _free(view, workers, pool, int(view.pool[j]))
    if workers[j] and pool[j] == view.pool[j]:
        short -= _needs(view, j, int(workers[j]))
    gets = (workers > view.workers) & (pool == view.pool[j]) & ~view.is_service
    gets &= (view.priority <= view.priority[j]) & ((view.workers == 0) | (view.pool == pool))
    gets[j] = False
    at = np.flatnonzero(gets)
    back: list[int] = []
    for i in at[np.lexsort((-view.job[at], view.priority[at]))].tolist():
        if short <= 0:
            break
        short -= _needs(view, i, int(workers[i])) - _needs(view, i, int(view.workers[i]))
        back.append(i)
    return back if short <= 0 else None


def _needs(view: Snapshot, j: int, workers: int) -> int:
    return int(workers * view.width[j] + view.fixed_milli[j]) if workers else 0


def _free(view: Snapshot, workers: IntArray, pool: IntArray, at: int) -> int:
    return int((view.capacity - view.used_milli(workers, pool))[at])
