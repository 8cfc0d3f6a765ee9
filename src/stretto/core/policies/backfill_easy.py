"""EASY backfill: first come, first served, with one reservation."""

from __future__ import annotations

import math

from stretto.core.backfill import TIE_S, Outlook, Walk
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot


@policy("backfill-easy", traits=Traits(preempts="never", uses=frozenset({"length"})))
def backfill_easy(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Order of submission, never preempts; later jobs may start first if they do not delay the head of the queue.

    The head is the first job that does not fit. Its reservation is for the shadow time s, when the running jobs
    will have given back enough by their estimates; `extra` is what will be free at s beside it. A later job starts
    now if it fits now and either ends by s or is no wider than `extra`, which then shrinks by its width. Jobs behind
    the head hold no reservation: they may be delayed by those that pass them. All is planned anew at every event.
    Without an estimate only the width rule applies.
    """
    walk = Walk(view)
    if not walk.queue:
        return walk.decision()
    outlook = Outlook(walk)
    head, *others = walk.queue
    shadow_s = outlook.profile.earliest(walk.need[head], math.inf)
    extra = outlook.profile.free_at(shadow_s) - walk.need[head]
    walk.say(head, Reason.RESERVED, walk.need[head] / GPU, outlook.shown(shadow_s))
    for j in others:
        in_time = view.now_s + outlook.length_s[j] <= shadow_s + TIE_S
        if walk.need[j] > walk.free:
            walk.say(j, Reason.NO_ROOM, walk.need[j] / GPU, walk.free / GPU)
        elif in_time or walk.need[j] <= extra:
            walk.start(j, Reason.BACKFILLED, outlook.shown(shadow_s))
            extra -= 0 if in_time else walk.need[j]
        else:
            walk.say(j, Reason.WOULD_DELAY, outlook.shown(shadow_s), walk.need[j] / GPU)
    return walk.decision()
