"""Shares are the least that meets a deadline, found as a slow search finds them, and never more than is free."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from strategies import job, view_of
from stretto.core.deadlines import Job, Plan, Planner, Room, job_of, standing

GPUS = 8


def job_with(left: float, due_s: float, levels: tuple[int, ...] = (1, 2, 4, 8), power: float = 1.0) -> Job:
    """A job on whole GPUs that runs at n ** power steps/s on n of them."""
    rate = [0.0, *(n**power for n in levels)]
    return Job(0, 0, due_s, left, [0, *levels], [0, *(n * 1000 for n in levels)], rate)


def planner(gap_s: float = 1.0) -> Planner:
    return Planner(0.0, GPUS * 1000, gap_s, False)


def empty() -> Room:
    return Room([0.0], [GPUS * 1000])


def work_by(job: Job, plan: Plan, due_s: float) -> float:
    """Steps the plan does before a time."""
    ends = (*plan.at_s[1:], plan.end_s)
    spans = zip(plan.at_s, ends, plan.workers, strict=True)
    return sum(max(0.0, min(end, due_s) - begin) * job.rate[job.levels.index(n)] for begin, end, n in spans)


def room_at(room: Room, time_s: float) -> int:
    return next(m for t, m in reversed(list(zip(room.at_s, room.milli, strict=True))) if t <= time_s)


def test_levels_are_the_ones_that_gain() -> None:
    view = view_of(8, [job(min_workers=1, max_workers=7, rate=[0, 5, 4, 5, 6, 6, 6, 9], remaining=math.nan)])
    found = job_of(view, 0)
    assert found.levels == [0, 1, 4, 7]
    assert found.rate == [0.0, 5.0, 6.0, 9.0]
    assert math.isnan(found.left)
    rigid = job_of(view_of(8, [job(size=3, width=250, fixed_milli=500)]), 0)
    assert (rigid.levels, rigid.need) == ([0, 3], [0, 1250])


def test_share_is_the_smallest_level_in_time() -> None:
    plan = planner().share(job_with(300.0, 100.0), 300.0, empty(), 0.0)
    assert plan == Plan((0.0,), (4,), (4000,), 75.0, 4000 * 75.0)
    assert planner().share(job_with(801.0, 100.0), 801.0, empty(), 0.0) is None
    assert planner().share(job_with(1.0, 0.0), 1.0, empty(), 0.0) is None


def test_a_level_is_held_from_the_latest_moment_that_suffices() -> None:
    room = Room([0.0, 40.0], [7000, 8000])
    # 2 GPUs do 200 in time, too little; 4 from 40 s on would do 240 alone. So 2 until then, and 4 for what is left.
    plan = planner().share(job_with(220.0, 100.0), 220.0, room, 0.0)
    assert plan == Plan((0.0, 40.0), (2, 4), (2000, 4000), 75.0, 2000 * 40.0 + 4000 * 35.0)


def test_plans_end_with_a_slot_or_where_the_room_does() -> None:
    wide = planner(gap_s=60.0)
    assert wide.share(job_with(70.0, 100.0), 70.0, empty(), 0.0) == Plan((0.0,), (1,), (1000,), 120.0, 120_000.0)
    narrow = Room([0.0, 90.0], [8000, 0])
    assert wide.share(job_with(70.0, 100.0), 70.0, narrow, 0.0) == Plan((0.0,), (1,), (1000,), 90.0, 90_000.0)


def test_fastest_uses_all_there_is() -> None:
    room = Room([0.0, 10.0], [3000, 8000])
    plan = planner().fastest(job_with(100.0, 5.0), 100.0, room, 0.0)
    assert plan is not None
    assert (plan.at_s, plan.workers, plan.end_s) == ((0.0, 10.0), (2, 8), 20.0)
    assert planner().fastest(job_with(1.0, 5.0, levels=(16,)), 1.0, room, 0.0) is None


def test_a_standing_plan_counts_only_while_it_keeps_its_deadline() -> None:
    plan = Plan((0.0, 50.0), (2, 4), (2000, 4000), 100.0, 0.0)
    assert standing(job_with(280.0, 100.0), plan, 10.0) == Plan((10.0, 50.0), (2, 4), (2000, 4000), 100.0, 280_000.0)
    assert standing(job_with(281.0, 100.0), plan, 10.0) is None
    assert standing(job_with(200.0, 90.0), plan, 60.0) is None
    assert standing(job_with(1.0, 200.0), plan, 100.0) is None
    assert standing(job_with(1.0, 100.0, levels=(1, 2)), plan, 10.0) is None


@st.composite
def rooms(draw: st.DrawFn) -> Room:
    steps = draw(st.lists(st.tuples(st.integers(1, 30), st.integers(0, GPUS)), max_size=6))
    at_s, milli = [0.0], [draw(st.integers(0, GPUS)) * 1000]
    for span, free in steps:
        if free * 1000 != milli[-1]:
            at_s.append(at_s[-1] + span)
            milli.append(free * 1000)
    return Room(at_s, milli)


@given(
    rooms(),
    st.integers(1, 400),
    st.integers(1, 90),
    st.sampled_from([0.4, 0.8, 1.0]),
    st.sampled_from([(1, 2, 4, 8), (2, 4), (3,), (1, 2, 3)]),
    st.sampled_from([0.0, 1.0, 7.0]),
)
def test_shares_are_those_of_a_search_second_by_second(
    room: Room, left: int, due: int, power: float, levels: tuple[int, ...], gap_s: float
) -> None:
    job = job_with(left, due, levels, power)
    feasible = [
        level
        for level in range(1, len(job.levels))
        if sum(job.rate[min(level, job.fit(room_at(room, t)))] for t in range(due)) >= left - 1e-9
    ]
    plan = planner(gap_s).share(job, left, room, 0.0)
    assert (plan is None) == (not feasible)
    if plan is not None:
        assert max(plan.workers) <= job.levels[feasible[0]]
        assert work_by(job, plan, due) >= left - 1e-6
        rest = room.less(plan)
        assert min(rest.milli) >= 0
        assert _same(rest.less(plan, +1), room)


def _same(one: Room, other: Room) -> bool:
    times = sorted({*one.at_s, *other.at_s})
    return all(room_at(one, t) == room_at(other, t) for t in times)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8),
    st.sampled_from([1, 2]),
)
def test_with_linear_scaling_feasible_means_that_the_work_fits_before_every_deadline(
    jobs: list[tuple[int, int]], gpus: int
) -> None:
    """All levels exist on 1 or 2 GPUs, so the shares find a plan exactly when there is one."""
    jobs.sort(key=lambda j: j[1])
    levels = (1, 2)[:gpus]
    slack = [gpus * due - sum(work for work, _ in jobs[: i + 1]) for i, (_, due) in enumerate(jobs)]
    out = Planner(0.0, gpus * 1000, 0.0, False).outlook(
        [Job(i, i, due, work, [0, *levels], [0, *(n * 1000 for n in levels)], [0.0, *map(float, levels)])
         for i, (work, due) in enumerate(jobs)]
    )  # fmt: skip
    if min(slack) < 0:
        assert out.late
    if min(slack) >= 1:
        assert not out.late
