"""Conservative backfill: first come, first served, with a reservation for everyone."""

from __future__ import annotations

import math

from stretto.core.backfill import Outlook, Walk
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


@policy("backfill-conservative", traits=Traits(preempts="never", starvation_free=True, uses=frozenset({"length"})))
def backfill_conservative(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Order of submission, never preempts; a later job may start first only if it delays no job before it.

    In order of submission every waiting job reserves the earliest time at which it fits for its whole estimated
    length beside the running jobs and all reservations before it. Whose time is now, starts. All is planned anew at
    every event, in the same order; so with exact estimates a reservation never moves, and with pessimistic ones
    it only moves to an earlier time. A job without an estimate needs its room for ever.
    """
    walk = Walk(view)
    if not walk.queue:
        return walk.decision()
    outlook = Outlook(walk)
    soonest_s = math.inf
    for j in walk.queue:
        need, length_s = walk.need[j], outlook.length_s[j]
        start_s = outlook.profile.earliest(need, length_s)
        if start_s <= view.now_s:
            walk.start(j, Reason.BACKFILLED, outlook.shown(soonest_s))
        elif need <= walk.free:
            walk.say(j, Reason.WOULD_DELAY, outlook.shown(soonest_s), outlook.shown(start_s))
        else:
            walk.say(j, Reason.RESERVED, need / GPU, outlook.shown(start_s))
        if start_s < math.inf:
            outlook.profile.take(need, start_s, start_s + length_s)
        if start_s > view.now_s:
            soonest_s = min(soonest_s, start_s)
    return walk.decision()
