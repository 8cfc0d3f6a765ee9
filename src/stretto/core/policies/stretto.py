"""Our own policy: start everybody, hand out the rest by marginal benefit, let nobody fall behind.

Resizing costs milliseconds, so it is done whenever it pays. One decision, in steps:

1. **How long is left?** The known remaining work, or, for unknown lengths, what the jobs submitted around it needed
   (`estimate.siblings`). Everything is counted in seconds on the job's minimum of workers.
2. **Who is falling behind?** A fair world, in which everybody always holds an equal share, is kept beside the real one
   (`fairshare`). A job that could no longer end within `fairness` times its completion time there is *late*, and stays
   so until half of that slack is made up; where starts cost something, two stints (step 3) more are
   granted. Where speed-ups change as jobs go on and nobody has been there yet, half
   of the slack is kept in reserve. This is looked at when the next job might become late, not at every event.
3. **Start.** Minimums in order of priority; late jobs first; then the least time left first; whoever does not fit is
   skipped. A running job is only displaced if that pays for its restart, and for a late job only once it has run
   for many times what a start costs (`_stretto_start`).
4. **Catch up.** Late jobs are raised to their fair share.
5. **Hand out the rest.** The worth of progress of the i-th largest of the jobs is v(i) = (i^c − (i−1)^c)^(1/c),
   c = 1/(1−p): the exact derivative of the total completion time under heSRPT for speed-ups n^p. A worker of job j is
   worth v(j) × its gain in speed; the best ones are taken first, on concave hulls. A worker that is already there is
   worth more, by what a resize costs, and nothing moves for a gain smaller than its cost (`_stretto_sizes`).

See docs/design/stretto-policy.md for the experiments that led here.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import numpy as np

from stretto.core import fairshare, marginal
from stretto.core.decision import Decision, Memory
from stretto.core.estimate import course as courses
from stretto.core.estimate.course import Course
from stretto.core.fairshare import FairWorld
from stretto.core.hull import Hulls, hulls
from stretto.core.options import Factor, Period
from stretto.core.policies._stretto_jobs import Jobs, Late, judge, places, stint_s
from stretto.core.policies._stretto_sizes import Market, catch_up, hand_out
from stretto.core.policies._stretto_start import Stints, start
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    p: Annotated[float, msgspec.Meta(ge=0, le=0.99)] = 0.3
    """How far small jobs are preferred: 0 not at all, near 1 entirely."""
    fairness: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 1.18
    """Completion time, as a multiple of that under equal sharing, at which a job goes first."""
    patience: Factor = 0.3
    """With unknown lengths a running job gives way only to one whose outlook is this much shorter."""
    quantum_s: Period = 20.0
    """Shortest time between two looks at who is late; late jobs stay so for six times that, or 5 % of their length."""


_RECHECK, _RECHECK_SHARE = 6.0, 0.05
_LOOK_S = 3600.0
_SLACK = 2.0


class _Recall(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered from decision to decision."""

    world: FairWorld
    course: Course
    curves: Hulls
    """Hulls of the course's table: made again only when the snapshot brings another table."""
    between_s: float
    """Typical time between two decisions."""
    at_s: float
    newest: int
    """The youngest job that was taken into account."""
    look_s: float
    """When somebody might become late; what was seen at the last look follows."""
    job: IntArray
    late: BoolArray
    behind: FloatArray
    share: FloatArray
    stints: Stints


@policy(
    "stretto",
    traits=Traits(
        work_conserving=True,
        preempts="any",
        elastic=True,
        starvation_free=True,
        hysteresis=True,
        uses=frozenset({"curve", "history", "priority"}),
    ),
    options=Options,
)
def stretto(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Everybody starts at once; the rest goes where it shortens completion most; nobody falls behind a fair share."""
    recall = _recalled(view, memory)
    jobs, least = judge(view)
    # Sizes that nobody knows are learned from the pace of jobs up to their end: there we look every time.
    looks = jobs.unknown is not None or view.now_s >= recall.look_s
    if looks:
        recall = _look(view, jobs, least, recall, options)
    late = _seen(view, recall)
    begun = start(view, jobs, late, recall.stints, options.patience, options.quantum_s)
    recall = msgspec.structs.replace(recall, stints=begun.stints)
    workers = begun.workers
    free = catch_up(view, late, workers, begun.free)
    last = hand_out(view, jobs, workers, free, Market(recall.curves, recall.between_s, options.p))
    if not looks and len(view) and view.job[-1] > recall.newest:
        recall = _expect(view, jobs, least, workers, recall, options)
    if looks:
        world = fairshare.paced(recall.world, view, view.rate(workers))
        recall = msgspec.structs.replace(recall, world=world)
    return _explain(view, jobs, late, workers, begun.left, last, recall, options)


def _recalled(view: Snapshot, memory: Memory) -> _Recall:
    """The memory, brought up to date with the snapshot's table and clock."""
    if memory is None:
        none, empty = np.empty(0), np.empty(0, np.int64)
        return _Recall(
            world=fairshare.empty(view), course=courses.empty(view), curves=hulls(view.rates[0]), between_s=600.0,
            at_s=view.now_s, newest=-1, look_s=view.now_s, job=empty, late=np.empty(0, np.bool_), behind=none,
            share=none, stints=Stints(empty, none, np.empty(0, np.bool_)),
        )  # fmt: skip
    recall: _Recall = memory
    passed = view.now_s - recall.at_s
    between = recall.between_s + 0.1 * (passed - recall.between_s) if passed > 0 else recall.between_s
    same = recall.course.fits(view)
    curves = recall.curves if same else hulls(view.rates[0])
    # The speed-up of jobs of one size means nothing.
    rigid = bool((view.min_workers == view.max_workers).all())
    course = recall.course if same and rigid else courses.watched(recall.course, view)
    return msgspec.structs.replace(recall, course=course, curves=curves, between_s=between, at_s=view.now_s)


def _look(view: Snapshot, jobs: Jobs, least: FloatArray, recall: _Recall, options: Options) -> _Recall:
    """Step 2: advance the fair world and find who is late, and when the next job might be."""
    size = view.done + view.remaining
    world = fairshare.advance(recall.world, view, recall.course, size)
    at = fairshare.positions(world, view)
    share = world.share[at]
    age_s = view.now_s - view.submit_s
    # Where a start costs something, jobs wait for the stints of others, and that is no reason to hurry.
    slack_s = _SLACK * stint_s(view.start_s, options.quantum_s)
    fair_s = np.maximum(fairshare.age_at(world, view, least * jobs.unit), 1.0) + slack_s
    rest_s = _rest_s(view, recall.course, np.maximum(view.min_workers, share), least * jobs.unit)
    behind = np.where(world.progress[at] > 0, (age_s + rest_s) / fair_s, 0.0)
    halfway = (1 + options.fairness) / 2
    if recall.course.known:
        behind = np.where(courses.unsure(recall.course, view.curve), behind * options.fairness / halfway, behind)
    late = behind >= np.where(_held_as_late(view, recall), halfway, options.fairness)
    behind = np.where(late, np.maximum(behind, options.fairness), behind)
    soon = (options.fairness - behind) * fair_s
    # Something usually happens of itself after `between_s`: no need to be woken sooner.
    spacing_s = max(options.quantum_s, min(recall.between_s, _RECHECK * options.quantum_s))
    again_s = np.maximum(_RECHECK * options.quantum_s, _RECHECK_SHARE * least)
    soon = np.where(late, again_s, np.maximum(soon, spacing_s))
    look = view.now_s + float(soon.min(initial=math.inf))
    newest = int(view.job.max(initial=-1))
    return msgspec.structs.replace(
        recall, world=world, newest=newest, look_s=look, job=view.job, late=late, behind=behind, share=share
    )


def _held_as_late(view: Snapshot, recall: _Recall) -> BoolArray:
    """Jobs that run because they were late at the last look."""
    at, known = places(recall.job, view)
    if not known.any():
        return known
    held: BoolArray = known & recall.late[at] & (view.workers > 0)
    return held


def _rest_s(view: Snapshot, course: Course, workers: FloatArray, size: FloatArray) -> FloatArray:
    """Seconds to a size in steps on that many workers."""

    def speed(row: IntArray) -> FloatArray:
        return fairshare.speed_on(view.rates, row, workers, view.min_workers) / np.maximum(size, 1e-12)

    done = np.clip(view.done / np.maximum(size, 1e-12), 0.0, 1.0)
    return courses.walk(course, view.curve, done, speed, math.inf)[0]


def _expect(
    view: Snapshot, jobs: Jobs, least: FloatArray, workers: IntArray, recall: _Recall, options: Options
) -> _Recall:
    """Between two looks: the earliest moment at which a newcomer that did not get all it can use might be late."""
    short = (view.job > recall.newest) & (workers < view.max_workers)
    fastest = np.maximum(view.rate(view.max_workers)[short] / jobs.unit[short], 1.0)
    spare_s = (options.fairness - 1) * float((least[short] / fastest).min(initial=_LOOK_S))
    look = min(recall.look_s, view.now_s + max(options.quantum_s, spare_s))
    return msgspec.structs.replace(recall, newest=int(view.job[-1]), look_s=look)


def _seen(view: Snapshot, recall: _Recall) -> Late | None:
    """Who was late at the last look and is still here; None if nobody is."""
    if not recall.late.any():
        return None
    job, behind, share = recall.job[recall.late], recall.behind[recall.late], recall.share[recall.late]
    at = np.minimum(np.searchsorted(job, view.job), len(job) - 1)
    late = job[at] == view.job
    if not late.any():
        return None
    return Late(late, np.where(late, behind[at], 0.0), np.where(late, share[at], 0.0))


def _explain(
    view: Snapshot,
    jobs: Jobs,
    late: Late | None,
    workers: IntArray,
    left: FloatArray,
    last: FloatArray,
    recall: _Recall,
    options: Options,
) -> Decision:
    if (view.min_workers == view.max_workers).all():
        runs = workers > 0
        reason = np.where(runs, Reason.RUNS, np.where(view.workers > 0, Reason.PREEMPTED, Reason.NO_ROOM))
        decision = Decision.of(view, workers, reason, jobs.need / GPU, left / GPU, memory=recall, wake_s=recall.look_s)
    else:
        decision = marginal.decision(view, workers, left, last, last, memory=recall, wake_s=recall.look_s)
    if late is None:
        return decision
    first = late.late & (workers > 0)
    reason, detail = decision.reason.copy(), decision.detail.copy()
    reason[first] = Reason.BEHIND_FAIR_SHARE
    detail[first, 0], detail[first, 1] = late.behind[first], options.fairness
    return msgspec.structs.replace(decision, reason=reason, detail=detail)
