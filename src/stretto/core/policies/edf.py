"""Earliest deadline first."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule, decide, sizes, walk
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.services import only
from stretto.core.snapshot import BoolArray, IntArray, Snapshot

RULE = ListRule(key=lambda view: view.deadline_s, preempts=True)

_SLACK_S = 1e-6


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    admission: bool = False
    """Turn a job away when, by the plan for all jobs admitted so far, it would end late or make another one late."""


@policy(
    "edf",
    traits=Traits(preempts="higher", work_conserving=True, uses=frozenset({"deadline"})),
    options=Options,
    rule=lambda options: None if options.admission else RULE,
)
def edf(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Preemptive; key = absolute deadline; runs every job that fits at its requested size, in that order.

    Jobs without a deadline come last, jobs past theirs still run. With `admission` each newcomer is planned once,
    together with the admitted jobs, as if nobody else came: it is rejected if it would end late itself, or one of them
    would that would not without it. A length that is not known cannot be planned: such a job is rejected if it has
    a deadline. The memory is the numbers of the admitted jobs.
    """
    if not options.admission:
        return decide(RULE, view)
    admitted = _admit(view, memory)
    rest = decide(RULE, only(view, admitted))
    workers, reason = np.zeros(len(view), np.int64), np.full(len(view), int(Reason.REJECTED_DEADLINE))
    detail = np.stack((view.deadline_s - view.now_s, np.zeros(len(view))), axis=1)
    workers[admitted], reason[admitted], detail[admitted] = rest.workers, rest.reason, rest.detail
    return Decision.of(view, workers, reason, detail[:, 0], detail[:, 1], memory=view.job[admitted], rejected=~admitted)


def _admit(view: Snapshot, memory: Memory) -> BoolArray:
    """Those who may stay: known from before, running, without a deadline, or harmless by plan."""
    ends = np.isfinite(view.deadline_s)
    admitted = ~ends | (view.workers > 0)
    if memory is not None:
        admitted |= np.isin(view.job, memory)
    newcomers = np.flatnonzero(~admitted).tolist()
    if not newcomers:
        return admitted
    late = _late(view, np.flatnonzero(admitted & ends))
    for j in newcomers:
        admitted[j] = True
        late_with = _late(view, np.flatnonzero(admitted & ends))
        if late_with <= late:
            late = late_with
        else:
            admitted[j] = False
    return admitted


def _late(view: Snapshot, chosen: IntArray) -> set[int]:
    """Which of the chosen jobs would miss their deadlines if they had the cluster to themselves."""
    order = chosen[np.lexsort((view.job[chosen], view.deadline_s[chosen]))]
    size = sizes(RULE, view)
    left_s = (view.remaining_s(size) + np.where(view.workers > 0, 0.0, view.start_s))[order]
    waiting = list(
        zip(
            order.tolist(),
            (size * view.width + view.fixed_milli)[order].tolist(),
            np.where(np.isnan(left_s), math.inf, left_s).tolist(),
            view.deadline_s[order].tolist(),
            strict=True,
        )
    )
    now_s = view.now_s
    late: set[int] = set()
    while waiting:
        fits, _ = walk([need for _, need, _, _ in waiting], view.total_milli, len(waiting))
        step_s = min((left for (_, _, left, _), fit in zip(waiting, fits, strict=True) if fit), default=math.inf)
        if step_s == math.inf:
            return late | {j for j, _, _, _ in waiting}
        now_s += step_s
        still = []
        for (j, need, left, deadline), fit in zip(waiting, fits, strict=True):
            if fit and left <= step_s:
                if now_s > deadline + _SLACK_S:
                    late.add(j)
            else:
                still.append((j, need, left - step_s if fit else left, deadline))
        waiting = still
    return late
