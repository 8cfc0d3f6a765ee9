"""Plans that meet deadlines: the least share of the cluster each job needs, and when it needs it.

Free room is kept as a short list of stretches of even room, so a plan costs the same whether its deadline is an hour
or a year away. A plan says how many workers a job has from each time on. Policies that promise deadlines
(`elasticflow`) build on this; nothing here knows who is admitted or why.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from stretto.core.snapshot import Snapshot

ROUNDING_S = 1e-3
"""Promises are made for this much before the deadline and kept for half of it, so that rounding breaks none."""
_TINY = 1e-12

Span: TypeAlias = tuple[float, float, float, int]
"""A stretch of even room, for one job: its begin, its length up to the job's deadline, its end, the widest level."""


class Job(msgspec.Struct, eq=False):
    """One active job as the planner sees it. Index 0 of the levels is: no workers."""

    row: int
    number: int
    due_s: float
    left: float
    levels: list[int]
    need: list[int]
    rate: list[float]

    def fit(self, milli: int) -> int:
        """Index of the widest level within so much room."""
        return bisect_right(self.need, milli) - 1


def job_of(view: Snapshot, row: int) -> Job:
    """The job in this row. Levels: minimum, powers of two, maximum, as far as each is faster than all before."""
    low, high = int(view.min_workers[row]), int(view.max_workers[row])
    curve = view.rates[0, view.curve[row]].tolist()
    levels, rate = [0], [0.0]
    for n in sorted({low, high, *(1 << k for k in range(low.bit_length(), high.bit_length()))}):
        speed = curve[min(n, len(curve) - 1)]
        if speed > rate[-1]:
            levels.append(n)
            rate.append(speed)
    if len(levels) == 1:
        levels, rate = [0, low], [0.0, 0.0]
    width, fixed = int(view.width[row]), int(view.fixed_milli[row])
    need = [n * width + fixed if n else 0 for n in levels]
    left = float(view.remaining[row]) if rate[-1] else math.nan
    due_s = float(view.deadline_s[row]) - ROUNDING_S / 2
    return Job(row, int(view.job[row]), due_s, max(left, _TINY) if left == left else left, levels, need, rate)


class Plan(msgspec.Struct, frozen=True):
    """Workers of one job, and the milli-GPU they take, from each time on until `end_s`, when its work is done."""

    at_s: tuple[float, ...]
    workers: tuple[int, ...]
    milli: tuple[int, ...]
    end_s: float
    cost: float
    """Milli-GPU seconds."""

    def change_s(self) -> float:
        """When it first gets another number of workers, or ends."""
        return self.at_s[1] if len(self.at_s) > 1 else self.end_s


class Room(msgspec.Struct, frozen=True):
    """Milli-GPU that are free from each time on; the last value holds for ever. Neighbours differ."""

    at_s: list[float]
    milli: list[int]

    def less(self, plan: Plan, sign: int = -1) -> Room:
        """What is left beside the plan; with sign +1, what there is once the plan is given back."""
        after = bisect_right(self.at_s, plan.end_s)
        at_s: list[float] = []
        milli: list[int] = []
        mine = other = 0
        for time_s in sorted({*self.at_s[:after], *plan.at_s, plan.end_s}):
            while other < after and self.at_s[other] <= time_s:
                other += 1
            while mine < len(plan.at_s) and plan.at_s[mine] <= time_s:
                mine += 1
            taken = plan.milli[mine - 1] if mine and time_s < plan.end_s else 0
            free = self.milli[other - 1] + sign * taken
            if not milli or milli[-1] != free:
                at_s.append(time_s)
                milli.append(free)
        return Room(at_s + self.at_s[after:], milli + self.milli[after:])


class Outlook(msgspec.Struct, eq=False):
    """Plans for all promised jobs, what they leave free, and whose deadline they miss."""

    plans: dict[int, Plan]
    room: Room
    late: set[int]


class Planner(msgspec.Struct, eq=False):
    """Shares and plans as of one moment."""

    now_s: float
    capacity_milli: int
    gap_s: float
    to_next_change: bool

    def empty(self) -> Outlook:
        """Nothing planned yet."""
        return Outlook({}, Room([self.now_s], [self.capacity_milli]), set())

    def outlook(self, jobs: Sequence[Job]) -> Outlook:
        """Shares in order of deadline; then whoever is late, as fast as it goes."""
        out = self.empty()
        late = [job for job in jobs if not self.book(out, job, self.share(job, job.left, out.room, self.now_s))]
        self.book_late(out, late)
        return out

    def book_late(self, out: Outlook, jobs: Sequence[Job]) -> None:
        """Add jobs that cannot make it, as fast as they go on what is left."""
        for job in jobs:
            out.late.add(job.number)
            self.book(out, job, self.fastest(job, job.left, out.room, self.now_s))

    def book(self, out: Outlook, job: Job, plan: Plan | None) -> bool:
        """Add the plan, if there is one."""
        if plan is None:
            return False
        out.plans[job.number] = plan
        out.room = out.room.less(plan)
        return True

    def share(self, job: Job, left: float, room: Room, start_s: float) -> Plan | None:
        """The least that does the work by the deadline; None if nothing does."""
        spans = self._spans(job, room, start_s, job.due_s)
        for level in range(1, len(job.levels)):
            done = 0.0
            for i in range(len(spans) - 1, -1, -1):
                _, work_s, _, fit = spans[i]
                done += work_s * job.rate[min(level, fit)]
                if done >= left:
                    levels = [min(level - 1, span[3]) for span in spans[:i]]
                    levels += [min(level, span[3]) for span in spans[i:]]
                    return self._filled(job, left, spans, levels)
        return None

    def fastest(self, job: Job, left: float, room: Room, start_s: float) -> Plan | None:
        """As wide as the room allows, until the work is done; None if the job is wider than the cluster."""
        spans = self._spans(job, room, start_s, math.inf)
        levels = [fit for *_, fit in spans]
        return self._filled(job, left, spans, levels) if levels[-1] else None

    def raised(self, job: Job, plan: Plan, level: int, room: Room) -> tuple[Plan, Room]:
        """The plan at this level until the room next changes, then the share of the rest; and the room without it."""
        whole = room.less(plan, +1)
        change_s = whole.at_s[1] if len(whole.at_s) > 1 else math.inf
        rate, need, workers = job.rate[level], job.need[level], job.levels[level]
        if self.now_s + job.left / rate <= change_s:
            end_s = min(self._slot_end(self.now_s, job.left / rate), change_s)
            return Plan((self.now_s,), (workers,), (need,), end_s, need * (end_s - self.now_s)), whole
        left = job.left - (change_s - self.now_s) * rate
        rest = self.share(job, left, whole, change_s) or self.fastest(job, left, whole, change_s)
        assert rest is not None, "it has room already"
        cost = need * (change_s - self.now_s) + rest.cost
        again = 1 if rest.workers[0] == workers else 0
        return Plan(
            (self.now_s, *rest.at_s[again:]),
            (workers, *rest.workers[again:]),
            (need, *rest.milli[again:]),
            rest.end_s,
            cost,
        ), whole

    def _slot_end(self, begin_s: float, span_s: float) -> float:
        """The end of the slot in which work of this length ends."""
        slot_s = max(self.gap_s, ROUNDING_S)
        return begin_s + max(1, math.ceil(span_s / slot_s * (1 - _TINY))) * slot_s

    def _spans(self, job: Job, room: Room, start_s: float, due_s: float) -> list[Span]:
        ends = [*room.at_s[1:], math.inf]
        return [
            (max(begin_s, start_s), min(end_s, due_s) - max(begin_s, start_s), end_s, job.fit(milli))
            for begin_s, end_s, milli in zip(room.at_s, ends, room.milli, strict=True)
            if end_s > start_s and begin_s < due_s
        ]

    def _filled(self, job: Job, left: float, spans: list[Span], levels: list[int]) -> Plan:
        """Work through the spans at these levels; the plan ends with the slot in which the work does."""
        at_s: list[float] = []
        held: list[int] = []
        cost = 0.0
        last = max(i for i, level in enumerate(levels) if job.rate[level])
        for i, level in enumerate(levels):
            begin_s, work_s, end_s, _ = spans[i]
            rate, need = job.rate[level], job.need[level]
            if not held or held[-1] != level:
                at_s.append(begin_s)
                held.append(level)
            if rate and (work_s * rate >= left or i == last):
                break
            if rate:
                left -= work_s * rate
                cost += need * work_s
        end_s = min(self._slot_end(begin_s, left / rate), end_s)
        counted_s = spans[i + 1][0] if self.to_next_change and i + 1 < len(spans) else end_s
        workers = tuple(job.levels[level] for level in held)
        milli = tuple(job.need[level] for level in held)
        return Plan(tuple(at_s), workers, milli, end_s, cost + need * (counted_s - begin_s))


def standing(job: Job, plan: Plan, now_s: float) -> Plan | None:
    """What is left of a plan made earlier, if it still does the work in time."""
    sizes = set(zip(job.levels, job.need, strict=True))
    if plan.end_s <= now_s or not sizes.issuperset(zip(plan.workers, plan.milli, strict=True)):
        return None
    first = bisect_right(plan.at_s, now_s) - 1
    at_s, workers, milli = (now_s, *plan.at_s[first + 1 :]), plan.workers[first:], plan.milli[first:]
    done = cost = 0.0
    for begin_s, end_s, n, need in zip(at_s, (*at_s[1:], plan.end_s), workers, milli, strict=True):
        done += max(0.0, min(end_s, job.due_s + ROUNDING_S / 4) - begin_s) * job.rate[job.levels.index(n)]
        cost += (end_s - begin_s) * need
    return Plan(at_s, workers, milli, plan.end_s, cost) if done >= job.left else None
