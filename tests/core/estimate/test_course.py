"""What came next: learned from snapshots, walked, and where nobody has been."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, view_of
from stretto.core.estimate import course as courses
from stretto.core.estimate.course import Course
from stretto.core.snapshot import FloatArray, IntArray, Snapshot

RATES = ([0.0, 1.0, 1.5], [0.0, 1.0, 1.8], [0.0, 1.0, 2.0])


def seen(curve: list[int], done: list[float], view: Snapshot | None = None) -> Snapshot:
    """Jobs of 100 steps on rows of one table, so far."""
    if view is None:
        view = view_of(4, [job(max_workers=2, rate=list(rate)) for rate in RATES])
    jobs = np.arange(len(curve))
    columns = {name: getattr(view, name)[:1].repeat(len(curve)) for name in ("min_workers", "max_workers", "submit_s")}
    return msgspec.structs.replace(
        view, job=jobs, curve=np.array(curve), done=np.array(done), remaining=100.0 - np.array(done), **columns
    )


def watch(*views: Snapshot) -> Course:
    course = courses.empty(views[0])
    for view in views:
        course = courses.watched(course, view)
    return course


def test_one_job_teaches() -> None:
    first = seen([0], [0.0])
    course = watch(first, seen([0], [20.0], first), seen([1], [31.0], first), seen([2], [80.0], first))
    assert course.follows.tolist() == [1, 2, -1]
    assert course.begins.tolist() == pytest.approx([1, 0.31, 0.8])
    assert course.known


def test_nothing_changes_nothing_is_known() -> None:
    first = seen([0, 1], [0.0, 0.0])
    assert not watch(first, seen([0, 1], [50.0, 70.0], first)).known


def test_the_earliest_sight_counts_and_skipped_rows_are_filled_in() -> None:
    """The first job was looked at too rarely: it seems to go from row 0 to row 2. The second shows what is between."""
    first = seen([0, 0], [0.0, 0.0])
    course = watch(first, seen([2, 0], [90.0, 20.0], first), seen([2, 1], [95.0, 40.0], first))
    assert course.follows.tolist() == [1, -1, -1]
    course = courses.watched(course, seen([2, 2], [99.0, 85.0], first))
    assert course.follows.tolist() == [1, 2, -1]
    assert course.begins.tolist() == pytest.approx([1, 0.4, 0.85])


def test_another_table_starts_anew() -> None:
    first = seen([0], [0.0])
    course = watch(first, seen([1], [50.0], first))
    other = msgspec.structs.replace(seen([1], [60.0], first), rates=2 * first.rates)
    assert not courses.watched(course, other).known
    equal = msgspec.structs.replace(seen([1], [60.0], first), rates=first.rates.copy())
    assert courses.watched(course, equal).known


def test_unknown_lengths_teach_nothing() -> None:
    first = seen([0], [0.0])
    then = msgspec.structs.replace(seen([1], [50.0], first), remaining=np.array([math.nan]))
    assert not watch(first, then).known


def test_unsure_where_nobody_was() -> None:
    """Seen: 0 to 1 at half. A row that never changed is no reason to doubt; the end was not seen until it was."""
    first = seen([0, 0], [0.0, 0.0])
    course = watch(first, seen([1, 0], [50.0, 10.0], first))
    assert courses.unsure(course, np.array([0, 1, 2])).tolist() == [True, True, False]
    course = courses.watched(course, seen([2, 0], [95.0, 10.0], first))
    assert courses.unsure(course, np.array([0, 1, 2])).tolist() == [False, False, False]


@given(
    begins=st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2, unique=True).map(sorted),
    speeds=st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3),
    share=st.floats(0.0, 1.0),
    limit_s=st.floats(0.0, 2000.0),
)
def test_walk(begins: list[float], speeds: list[float], share: float, limit_s: float) -> None:
    """Against small steps in time would be slow; against the integral of 1 / speed it is exact."""
    course = watch(seen([0], [0.0]))
    course = msgspec.structs.replace(course, follows=np.array([1, 2, -1]), begins=np.array([1.0, *begins]))
    pace = np.array(speeds)

    def speed(row: IntArray) -> FloatArray:
        return pace[row]

    row = np.array([sum(share >= begin for begin in begins)])
    spent_s, _ = courses.walk(course, row, np.array([share]), speed, math.inf)
    edges = [0.0, *begins, 1.0]
    right_s = sum(max(0.0, high - max(low, share)) / v for low, high, v in zip(edges, edges[1:], speeds, strict=False))
    assert spent_s[0] == pytest.approx(right_s, abs=1e-9)
    used_s, reached = courses.walk(course, row, np.array([share]), speed, limit_s)
    assert used_s[0] == pytest.approx(min(limit_s, right_s), abs=1e-9)
    rest_s, _ = courses.walk(
        course, np.array([sum(reached[0] >= b for b in begins)]), np.minimum(reached, 1.0), speed, math.inf
    )
    assert used_s[0] + rest_s[0] == pytest.approx(right_s, rel=1e-6, abs=1e-6)
