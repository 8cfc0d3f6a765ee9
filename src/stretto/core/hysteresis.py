"""Drop what does not pay: a resize that gains less than it costs is not made, and who is nearly done is left alone.

Where a change costs nothing everything pays, so worlds without costs are exactly as their policies decide.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from stretto.core import services, steps
from stretto.core.decision import Decision
from stretto.core.estimate.remaining import expected_steps
from stretto.core.reasons import Reason
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

_SOONEST_S = 1.0
"""A change that does not pay now is not looked at again sooner."""


def settle(view: Snapshot, decision: Decision) -> Decision:
    """The decision without the resizes that do not pay.

    A job whose growth or change of pool gains less than it costs stays as it is. A job that was to shrink stays as it
    is while nobody else is given the room; so does one that was to be stopped but ends within the time a start takes.
    Stretching room that others were given is never done: the result fits wherever the decision did.
    """
    runs = view.workers > 0
    changed = runs & ((decision.workers != view.workers) | ((decision.workers > 0) & (decision.pool != view.pool)))
    if not changed.any():
        return decision
    gain, left_s = np.zeros(len(view)), np.full(len(view), np.inf)
    few = services.only(view, changed)
    gain[changed] = gain_s(few, decision.workers[changed], decision.pool[changed])
    left_s[changed] = _left_s(few)
    # The size of a service is its load's business: neither speed nor an end is to be gained by it.
    loses = changed & (decision.workers > 0) & ~(gain > view.resize_s) & ~view.is_service & (view.resize_s > 0)
    # A guess at a length is too little to keep others waiting for.
    known = np.isfinite(view.remaining) & (view.remaining_sd == 0)
    cost_s = np.where(decision.workers > 0, view.resize_s, view.start_s)
    nearly = changed & known & (cost_s > 0) & (left_s <= cost_s)
    # Who has another size than it may have by now, because it was scaled, cannot keep it.
    allowed = (view.workers >= view.min_workers) & (view.workers <= view.max_workers)
    if view.step is not None:
        allowed &= steps.possible(view, view.workers) == view.workers
    workers, pool = decision.workers.copy(), decision.pool.copy()
    reason, detail = decision.reason.copy(), decision.detail.copy()
    free = view.capacity - view.used_milli(workers, pool)
    for j in _kept_first(view, decision, (loses | nearly) & allowed):
        back = np.zeros(len(free), np.int64)
        if workers[j]:
            back[pool[j]] = workers[j] * view.width[j] + view.fixed_milli[j]
        back[view.pool[j]] -= view.workers[j] * view.width[j] + view.fixed_milli[j]
        if (free + back >= 0).all():
            free = free + back
            workers[j], pool[j] = view.workers[j], view.pool[j]
            reason[j] = Reason.NEARLY_DONE if nearly[j] else Reason.NOT_WORTH_RESIZE
            detail[j] = (left_s[j], 0.0) if nearly[j] else (gain[j], view.resize_s[j])
    # Who has not said how long it is may turn out long: it is thought of again when it has run twice as long.
    unknown = (reason == Reason.NOT_WORTH_RESIZE) & changed & np.isnan(view.remaining)
    again_s = view.now_s + np.maximum(view.ran_s[unknown], _SOONEST_S).min(initial=np.inf)
    return msgspec.structs.replace(
        decision, workers=workers, pool=pool, reason=reason, detail=detail, wake_s=min(decision.wake_s, float(again_s))
    )


def gain_s(view: Snapshot, workers: IntArray, pool: IntArray) -> FloatArray:
    """Seconds that each running job would end sooner, not counting what the change costs. Never nan."""
    steps = expected_steps(view)
    top = view.rates.shape[2] - 1
    before = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(view.workers, top)]
    after = view.rates[pool, view.curve, np.minimum(workers, top)]
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = steps / before - steps / after
    # No speed before: any is a gain without end. None after: a loss without end.
    return np.where(np.isnan(gain), 0.0, gain)


def _left_s(view: Snapshot) -> FloatArray:
    """Seconds to the end at the present size."""
    top = view.rates.shape[2] - 1
    rate = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(view.workers, top)]
    left: FloatArray = np.divide(expected_steps(view), rate, out=np.full(len(view), np.inf), where=rate > 0)
    return left


def _kept_first(view: Snapshot, decision: Decision, candidates: BoolArray) -> Iterable[int]:
    """Jobs that may stay as they are: first those that give room back by it, then in order of number."""
    grows = (decision.workers > view.workers) & (decision.pool == view.pool)
    order: list[int] = np.lexsort((view.job, ~grows)).tolist()
    return [j for j in order if candidates[j]]
