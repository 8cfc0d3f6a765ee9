"""ElasticFlow: promise a deadline only if it can be kept, then spend what is left (Gu et al., ASPLOS 2023).

A job's *share* is the least that meets its deadline (`core.deadlines`): the smallest level which, given what
earlier deadlines leave free, does the work in time; it is held from the latest moment that suffices, and before that
the level below. One decision:

1. plan a share for every promised job, in order of deadline;
2. admit all newcomers if every deadline can be met with them, otherwise each, in order of arrival, with whom
   that is so; the others are turned away, or run without a promise (`reject=false`);
3. hand out the GPUs that the shares leave free now: jobs without any first, then one job at a time to its next
   level, chosen by its *toll*, the GPU-time that the step adds to its plan per added GPU. The paper takes the least
   toll, its code the most (`sign`); the published figures are the code's;
4. wake when the first plan changes.

Planning anew can lose a promise which the plan made last time still keeps: a job that was given extra GPUs has less
work left, so its new share may be smaller and end later than its old one, where another job was to follow. The
last plan is therefore remembered, and used whenever the new one would break a promise. With exact lengths and curves
and free resizes no admitted deadline is missed. A promised job that falls behind nevertheless (costs, failures,
wrong lengths) gets what the others' shares leave, as fast as it goes. Jobs without a deadline or of unknown length
live on step 3.

`original=true` plans as ElasticFlow's own simulator does: the newcomers of a decision are admitted together or not
at all, and never while a promised job is late; a plan's GPU-time is counted up to the next change of the free GPUs
after its end; the last plan is not remembered. That simulator also decides once per slot (`gap_s` of the world).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

from stretto.core.deadlines import ROUNDING_S, Job, Outlook, Plan, Planner, Room, job_of, standing
from stretto.core.decision import Decision, Memory
from stretto.core.options import Seconds
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, FloatArray, IntArray, Snapshot


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gap_s: Seconds = 60.0
    """Length of a slot: what a plan holds, it holds for whole slots. The world's setting of that name keeps
    decisions as far apart."""
    sign: Literal["code", "paper"] = "code"
    """Who grows first: most (code) or least (paper) extra GPU-time per added GPU."""
    reject: bool = True
    """Turn away jobs whose deadline cannot be met; otherwise they run when GPUs are free."""
    original: bool = False
    """As ElasticFlow's simulator, see above."""


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered: who has a promise and who was refused one, and the plans made last for so much room."""

    promised: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    plans: dict[int, Plan] = {}
    capacity_milli: int = -1


@policy(
    "elasticflow",
    traits=Traits(preempts="any", elastic=True, sees_falls=True, uses=frozenset({"length", "curve", "deadline"})),
    options=Options,
)
def elasticflow(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Promise deadlines that can be kept, by minimum satisfactory share; spend the rest by marginal GPU-time."""
    book = memory if isinstance(memory, Book) else Book()
    planner = Planner(view.now_s, view.total_milli, options.gap_s, options.original)
    promised, newcomers, others = sorted_out(view, book)
    out = planner.outlook(promised)
    if not options.original:
        out = _keep_promises(planner, out, promised, book)
    admit = _admit_together if options.original else _admit_each
    out, refused = admit(planner, out, promised, newcomers) if newcomers else (out, [])
    turned_away = refused if options.reject else []
    stay = [job for job in (*promised, *newcomers, *others) if job not in turned_away]
    stay.sort(key=_urgency)
    shares = {number: plan.workers[0] for number, plan in out.plans.items() if number not in out.late}
    levels, tolls = _grow(planner, out, stay, options.sign == "code")
    workers, reason, detail = _explained(view, out, stay, turned_away, shares, levels, tolls)
    rejected = np.zeros(len(view), np.bool_)
    rejected[[job.row for job in turned_away]] = True
    changes = [plan.change_s() for plan in out.plans.values()]
    return Decision.of(
        view,
        workers,
        reason,
        detail[:, 0],
        detail[:, 1],
        memory=Book(
            promised=frozenset(job.number for job in (*promised, *newcomers) if job not in refused),
            refused=frozenset(job.number for job in stay if job in refused or job.number in book.refused),
            plans=out.plans,
            capacity_milli=view.total_milli,
        ),
        wake_s=max(min(changes, default=math.inf), view.now_s + ROUNDING_S),
        rejected=rejected,
    )


def sorted_out(view: Snapshot, book: Book) -> tuple[list[Job], list[Job], list[Job]]:
    """Jobs with a promise, by deadline; jobs that ask for one, by arrival; jobs that live without."""
    promised: list[Job] = []
    newcomers: list[Job] = []
    others: list[Job] = []
    for row, number in enumerate(view.job.tolist()):
        job = job_of(view, row)
        started = not math.isnan(view.started_s[row])
        if number in book.refused or job.due_s == math.inf or math.isnan(job.left):
            others.append(job)
        elif number in book.promised or started:
            promised.append(job)
        else:
            job.due_s -= ROUNDING_S / 2
            newcomers.append(job)
    return sorted(promised, key=_urgency), newcomers, others


def _urgency(job: Job) -> tuple[float, int]:
    return job.due_s, job.number


def _keep_promises(planner: Planner, out: Outlook, promised: list[Job], book: Book) -> Outlook:
    """The new plans, or those made last time if these keep more promises."""
    if not out.late or planner.capacity_milli != book.capacity_milli:
        return out
    last = planner.empty()
    behind = []
    for job in promised:
        plan = book.plans.get(job.number)
        if plan is None or not planner.book(last, job, standing(job, plan, planner.now_s)):
            behind.append(job)
    planner.book_late(last, behind)
    return last if len(last.late) < len(out.late) else out


def _admit_each(planner: Planner, out: Outlook, promised: list[Job], newcomers: list[Job]) -> tuple[Outlook, list[Job]]:
    """Everybody, if that goes; otherwise one after the other, with all plans made anew or beside those there are."""
    trial = planner.outlook(sorted([*promised, *newcomers], key=_urgency))
    if trial.late <= out.late:
        return trial, []
    inside, refused = list(promised), []
    for job in newcomers:
        trial = planner.outlook(sorted([*inside, job], key=_urgency))
        if trial.late <= out.late:
            out = trial
        elif not planner.book(out, job, planner.share(job, job.left, out.room, planner.now_s)):
            refused.append(job)
            continue
        inside.append(job)
    return out, refused


def _admit_together(
    planner: Planner, out: Outlook, promised: list[Job], newcomers: list[Job]
) -> tuple[Outlook, list[Job]]:
    """All newcomers, if every deadline can be met with them; otherwise none."""
    trial = planner.outlook(sorted([*promised, *newcomers], key=_urgency))
    return (out, newcomers) if trial.late else (trial, [])


class Step(msgspec.Struct, frozen=True):
    """One job up one level: the GPU-time this adds per added GPU, its new plan, and the room without it."""

    job: Job
    toll: float
    plan: Plan | None
    room: Room | None


def _grow(planner: Planner, out: Outlook, jobs: list[Job], most: bool) -> tuple[dict[int, int], dict[int, float]]:
    """Raise one job after the other while GPUs are free; the level of each, and the toll of its last step."""
    levels = {job.number: 0 for job in jobs}
    tolls: dict[int, float] = {}
    for job in jobs:
        if job.number in out.plans:
            levels[job.number] = job.levels.index(out.plans[job.number].workers[0])
    spare = out.room.milli[0]
    while step := _best_step(planner, out, jobs, levels, spare, most):
        job, level = step.job, levels[step.job.number]
        spare -= job.need[level + 1] - job.need[level]
        levels[job.number], tolls[job.number] = level + 1, step.toll
        if step.plan is not None and step.room is not None:
            out.plans[job.number], out.room = step.plan, step.room.less(step.plan)
    return levels, tolls


def _best_step(
    planner: Planner, out: Outlook, jobs: list[Job], levels: dict[int, int], spare: int, most: bool
) -> Step | None:
    """The first job that has nothing; otherwise the one with the most, or the least, toll."""
    able = [job for job in jobs if _step_milli(job, levels[job.number]) <= spare]
    best, best_key = None, -math.inf
    for job in [job for job in able if not levels[job.number]][:1] or able:
        step = _step(planner, out, job, levels[job.number])
        key = -math.inf if math.isnan(step.toll) else step.toll if most else -step.toll
        if best is None or key > best_key:
            best, best_key = step, key
    return best


def _step(planner: Planner, out: Outlook, job: Job, level: int) -> Step:
    plan = out.plans.get(job.number)
    if plan is None:
        return Step(job, _toll(job, level), None, None)
    higher, room = planner.raised(job, plan, level + 1, out.room)
    return Step(job, (higher.cost - plan.cost) / max(_step_milli(job, level), 1), higher, room)


def _step_milli(job: Job, level: int) -> float:
    return job.need[level + 1] - job.need[level] if level + 1 < len(job.need) else math.inf


def _toll(job: Job, level: int) -> float:
    """Extra GPU-time per added GPU if a job without a plan keeps its size to the end; nan if that is not known."""
    if not level:
        return 0.0
    above, here = job.need[level + 1] / job.rate[level + 1], job.need[level] / job.rate[level]
    return job.left * (above - here) / max(_step_milli(job, level), 1)


def _explained(
    view: Snapshot,
    out: Outlook,
    stay: list[Job],
    turned_away: list[Job],
    shares: dict[int, int],
    levels: dict[int, int],
    tolls: dict[int, float],
) -> tuple[IntArray, IntArray, FloatArray]:
    """Workers, reason and the deciding numbers for every job."""
    workers, reason = np.zeros(len(view), np.int64), np.zeros(len(view), np.int64)
    detail = np.zeros((len(view), 2))
    free = view.total_milli - sum(job.need[levels[job.number]] for job in stay)
    for job in stay:
        level = levels[job.number]
        n, share = job.levels[level], shares.get(job.number)
        workers[job.row] = n
        if not n:
            reason[job.row], detail[job.row] = _waiting(
                job, out.plans.get(job.number), free, bool(view.workers[job.row]), view.now_s
            )
        elif level + 1 == len(job.levels):
            most = n >= view.max_workers[job.row]
            reason[job.row], detail[job.row] = Reason.AT_MAXIMUM if most else Reason.NO_USE_FOR_MORE, (n, 0.0)
        elif share is None:
            reason[job.row], detail[job.row] = Reason.RUNS, (job.need[level] / GPU, (free + job.need[level]) / GPU)
        elif n > share:
            reason[job.row], detail[job.row] = Reason.GROWN, (tolls[job.number], 0.0)
        else:
            reason[job.row], detail[job.row] = Reason.ADMITTED_SHARE, (job.need[level] / GPU, 0.0)
    for job in turned_away:
        reason[job.row], detail[job.row] = Reason.REJECTED_DEADLINE, (view.deadline_s[job.row] - view.now_s, 0.0)
    return workers, reason, detail


def _waiting(job: Job, plan: Plan | None, free: int, ran: bool, now_s: float) -> tuple[Reason, tuple[float, float]]:
    if plan is None:
        return Reason.PREEMPTED if ran else Reason.NO_ROOM, (job.need[1] / GPU, free / GPU)
    first = next(i for i, n in enumerate(plan.workers) if n)
    return Reason.RESERVED, (plan.milli[first] / GPU, plan.at_s[first] - now_s)
