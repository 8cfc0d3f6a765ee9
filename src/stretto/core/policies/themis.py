"""Themis: finish-time fairness by leases (Mahajan et al., NSDI 2020), in its practical form."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

from stretto.core import handout, marginal
from stretto.core.decision import Decision
from stretto.core.options import LONGEST_S
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import BoolArray, FloatArray, History, IntArray, Snapshot

_MINUTE_S = 60.0


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=LONGEST_S)] = 1200.0
    """How long a job keeps what it was given."""
    fairness: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.8
    """f: free GPUs are offered to the worst 1 - f of the jobs first."""


class Kept(msgspec.Struct, frozen=True):
    """Of each job seen last time: the sum of jobs x seconds over its life, and the end of its lease."""

    at_s: float
    active: int
    job: IntArray
    crowd_s: FloatArray
    until_s: FloatArray


@policy(
    "themis",
    traits=Traits(preempts="any", work_conserving=True, elastic=True, uses=frozenset({"curve", "history"})),
    options=Options,
)
def themis(view: Snapshot, memory: Kept | None, options: Options) -> Decision:
    """GPUs are leased; free ones go first to the jobs whose finish-time fairness is worst.

    rho = (age + time left on an equal share now) / (time in all on an equal share of the cluster, alone on it), with
    1/N of the cluster as the equal share: N counts the active jobs, now above, averaged over the job's life below.
    1. Jobs keep the workers of a running lease. All other GPUs are free.
    2. In order of rho, worst first, each job without a lease gets its minimum if that fits.
    3. The worst 1 - f of the jobs are offered the rest, up to their requested size: worker by worker to whoever's
       rho falls by the largest factor per GPU, which makes the product of 1 / rho large. That is the auction,
       without its charge for truthful bids.
    4. What is left then goes to all jobs, leases or not, by the same measure and up to their useful maximum.
    A lease runs `lease_s`; if anybody could use more, the policy asks to be woken when the next one ends.
    Where the length is unknown, that of finished jobs of the class stands in (`expected_work`).
    """
    crowd_s, until_s = _recall(view, memory)
    leased = (view.workers > 0) & (until_s > view.now_s)
    workers, free = _leased(view, leased)
    work = expected_work(view)
    rho = unfairness(view, work, crowd_s)
    order = np.lexsort((view.job, -rho))
    offered = order[: math.ceil((1 - options.fairness) * len(view) - 1e-9)]
    top, left = handout.useful(view), np.full(len(view), float(free))
    free = handout.give_minimums(view, order, workers, left, free)
    _spend(view, work, order, offered, workers, top, free)
    runs = workers > 0
    until_s = np.where(runs, np.where(leased, until_s, view.now_s + options.lease_s), 0.0)
    kept = Kept(view.now_s, len(view), view.job, crowd_s, until_s)
    wake_s = float(until_s[runs].min(initial=math.inf)) if (workers < top).any() else math.inf
    decision = handout.decision(view, workers, top, left, memory=kept, wake_s=wake_s)
    return _with_offers(decision, offered, rho)


def unfairness(view: Snapshot, work: FloatArray, crowd_s: FloatArray) -> FloatArray:
    """rho of every job, if it gets an equal share from now on."""
    age_s, gpus = view.now_s - view.submit_s, view.total_milli / np.maximum(view.width, 1)
    crowd = np.where(age_s > 0, crowd_s / np.where(age_s > 0, age_s, 1.0), len(view))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        left_s = np.where(work > 0, work / speed_on(view, gpus / max(len(view), 1)), 0.0)
        alone_s = (view.done + work) / speed_on(view, gpus / np.maximum(crowd, 1.0))
        rho: FloatArray = (age_s + left_s) / alone_s
    return np.where(np.isnan(rho), math.inf, rho)


def speed_on(view: Snapshot, workers: FloatArray) -> FloatArray:
    """Steps/s on a number of workers that need not be whole: linear below the minimum, level above the maximum."""
    low = view.min_workers
    share = np.clip(workers, low, view.max_workers)
    whole = share.astype(np.int64)
    below = view.rate(whole)
    speed: FloatArray = below + (share - whole) * (view.rate(whole + 1) - below)
    return speed * np.minimum(1.0, workers / low)


def expected_work(view: Snapshot) -> FloatArray:
    """Steps left. Where unknown: to the median length of those finished jobs of the class that were longer.

    With none of the class finished, all classes count. A job that outran them is taken to be half done, and a job of
    which nothing at all is known to need a minute at least, both at its minimum of workers.
    """
    unknown = np.isnan(view.remaining)
    if not unknown.any():
        return view.remaining
    speed = view.rate(view.min_workers)
    ran_s = np.where(speed > 0, view.done / np.where(speed > 0, speed, 1.0), 0.0)
    left_s = np.maximum(ran_s, _MINUTE_S)
    for klass in np.unique(view.klass[unknown]).tolist():
        mine = unknown & (view.klass == klass)
        left_s[mine] = _left_of(view.history, klass, ran_s[mine], left_s[mine])
    return np.where(unknown, left_s * speed, view.remaining)


def _left_of(history: History, klass: int, ran_s: FloatArray, otherwise_s: FloatArray) -> FloatArray:
    same = history.of_class(klass)
    sizes = np.sort((same if len(same) else history).size_s)
    if not len(sizes):
        return otherwise_s
    longer = np.searchsorted(sizes, ran_s, side="right")
    last = len(sizes) - 1
    low, high = np.minimum((longer + last) // 2, last), np.minimum((longer + last + 1) // 2, last)
    median_s = (sizes[low] + sizes[high]) / 2
    left_s: FloatArray = np.where(longer <= last, median_s - ran_s, otherwise_s)
    return left_s


def _recall(view: Snapshot, memory: Kept | None) -> tuple[FloatArray, FloatArray]:
    """Jobs x seconds over each job's life up to now, and the end of its lease (0: none)."""
    age_s = view.now_s - view.submit_s
    if memory is None or not len(memory.job):
        return len(view) * age_s, np.zeros(len(view))
    place = np.minimum(np.searchsorted(memory.job, view.job), len(memory.job) - 1)
    known = memory.job[place] == view.job
    since_s = np.minimum(view.now_s - memory.at_s, age_s)
    crowd_s = np.where(known, memory.crowd_s[place], 0.0) + memory.active * since_s
    return np.where(known, crowd_s, len(view) * age_s), np.where(known, memory.until_s[place], 0.0)


def _leased(view: Snapshot, leased: BoolArray) -> tuple[IntArray, int]:
    """The workers under lease, oldest job first as far as there is room, and what is free beside them."""
    return handout.held(msgspec.structs.replace(view, workers=np.where(leased, view.workers, 0)))


def _spend(
    view: Snapshot,
    work: FloatArray,
    order: IntArray,
    offered: IntArray,
    workers: IntArray,
    top: IntArray,
    free: int,
) -> None:
    """Steps 3 and 4: to those it is offered to, then to all."""
    gain = _log_gain(view, work)
    asked = np.clip(view.requested, view.min_workers, top)
    for group, most in ((offered, asked), (order, top)):
        _, free = handout.spend_by_gain(view, gain, group[workers[group] > 0], workers, most, free)
    # A gain may be too small to be told from none; the workers are still of use.
    handout.fill_in_order(view, order, workers, top, free)


def _log_gain(view: Snapshot, work: FloatArray) -> FloatArray:
    """-log of the time in all, [job, workers]: what differs from -log rho by a constant per job."""
    age_s = (view.now_s - view.submit_s)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        left_s = np.where(work[:, None] > 0, work[:, None] / marginal.speeds(view), 0.0)
    value: FloatArray = -np.log(np.maximum(age_s + left_s, 1e-9))
    return value


def _with_offers(decision: Decision, offered: IntArray, rho: FloatArray) -> Decision:
    """Those who were offered free GPUs and run below their maximum: how far behind they are, and the limit."""
    below = offered[decision.reason[offered] == Reason.FAIR_SHARE]
    reason, detail = decision.reason.copy(), decision.detail.copy()
    reason[below] = Reason.BEHIND_FAIR_SHARE
    detail[below, 0], detail[below, 1] = rho[below], rho[offered].min(initial=math.inf)
    return msgspec.structs.replace(decision, reason=reason, detail=detail)
