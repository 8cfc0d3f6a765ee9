"""Judging a job by those submitted around it: by hand, and against the definition worked out job by job."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core.estimate import siblings
from stretto.core.snapshot import FloatArray, History, Snapshot


def finished(*jobs: tuple[int, int, float, float]) -> History:
    """Class, number, submission and size of each."""
    history = History()
    for klass, number, submit_s, size_s in jobs:
        history = history.adding(klass, number, submit_s, size_s)
    return history


def one(history: History, attained: float, submit_s: float = 0.0, klass: int = 0) -> siblings.Outlook:
    """What is said of job number 100."""
    view = view_of(4, [job(submit_s=submit_s, klass=klass)], history=history)
    return siblings.outlook(msgspec.structs.replace(view, job=np.array([100])), np.array([attained]))


def test_at_first_an_hour_is_expected() -> None:
    assert one(History(), 7.0).left.tolist() == [3607.0]
    assert one(History(), 7.0).least.tolist() == [7.0]
    assert one(finished((0, 0, 0.0, 5.0), (0, 1, 0.0, 5.0)), 0.0).left.tolist() == [3600.0]


def test_a_sweep_takes_what_its_siblings_took() -> None:
    """Three siblings, submitted with it, took 100 s: so will it, but for a small doubt: a tail at 200."""
    sweep = finished(*((0, n, 0.0, 100.0) for n in (90, 91, 92)))
    fresh = one(sweep, 0.0)
    assert fresh.left[0] == pytest.approx((3.05 * 100 + 0.01 * 200) / 3.06)
    assert fresh.least[0] == pytest.approx(90)
    assert one(sweep, 60.0).left[0] == pytest.approx((3.05 + 0.01) * 40 / 3.05), "here it pays to stop at 100"


def test_who_outlived_its_siblings_is_on_the_tail() -> None:
    """At 100 s all that is left of the sample is the tail, at twice what it has reached."""
    sweep = finished(*((0, n, 0.0, 100.0) for n in (90, 91, 92)))
    late = one(sweep, 150.0)
    assert late.left.tolist() == [pytest.approx(150)]
    assert late.least.tolist() == [150]


def test_near_ones_count_more() -> None:
    """Those submitted with it took 10 s, those an hour before 1000 s, both in its class."""
    old = [(0, n, 0.0, 1000.0) for n in (1, 2, 3)]
    new = [(0, n, 3600.0, 10.0) for n in (97, 98, 99)]
    assert one(finished(*old, *new), 0.0, submit_s=3600.0).left[0] < 15
    assert one(finished(*old, *new), 0.0, submit_s=0.0).left[0] < one(finished(*old), 0.0).left[0]


def test_only_its_class_counts_unless_that_is_new() -> None:
    others = [(1, n, 0.0, 1000.0) for n in (1, 2, 3)]
    own = [(0, n, 0.0, 10.0) for n in (4, 5, 6)]
    assert one(finished(*others, *own), 0.0).left[0] < 11
    assert one(finished(*others), 0.0).left[0] == pytest.approx(1000, rel=0.3)


def test_the_best_limit_is_chosen() -> None:
    """Half of the class took 1 s, half 1000: looking for 1 s costs 1 s a job and ends every second one."""
    mixed = finished(*((0, n, -1e9, size) for n, size in enumerate((1.0, 1000.0) * 6)))
    assert one(mixed, 0.0).left[0] == pytest.approx(2, rel=0.3)
    assert one(mixed, 2.0).left[0] == pytest.approx(998, rel=0.3)


def test_siblings_that_still_run_prove_something() -> None:
    """Submitted together, one has run for 500 s: the other will need nearly as much."""
    sweep = finished(*((0, n, 0.0, 100.0) for n in (0, 1, 2)))
    view = view_of(4, [job(submit_s=1000.0), job(submit_s=1005.0), job(submit_s=2000.0)], history=sweep)
    view = msgspec.structs.replace(view, job=np.array([10, 11, 12]))
    found = siblings.outlook(view, np.array([500.0, 0.0, 0.0]))
    assert found.least.tolist() == pytest.approx([500, 450, 90])
    assert found.left[1] > 450
    assert found.left[2] < 200


def test_a_class_of_like_jobs_promises_what_its_shortest_took() -> None:
    """All of the class took 120 to 125 s: so will a job that was submitted long after; where they differ, who knows."""
    alike = finished(*((0, n, -1e9, size) for n, size in enumerate((120.0, 121.0, 125.0))))
    assert one(alike, 0.0).least.tolist() == [pytest.approx(0.9 * 120)]
    assert one(alike, 500.0).least.tolist() == [500]
    mixed = finished(*((0, n, -1e9, size) for n, size in enumerate((50.0, 121.0, 125.0))))
    assert one(mixed, 0.0).least.tolist() == [0]


def test_finished_jobs_of_no_length_are_no_trouble() -> None:
    """All that is left of the sample is a tail of two seconds."""
    empty = finished(*((0, n, 0.0, 0.0) for n in (90, 91, 92)))
    found = one(empty, 0.0)
    assert found.left.tolist() == [2]
    assert found.least.tolist() == [0]


def by_definition(view: Snapshot, attained: FloatArray, j: int) -> tuple[float, float]:
    """Time left and least size of one job."""
    mine = (int(view.klass[j]), int(view.job[j]))
    active = sorted((int(view.klass[i]), int(view.job[i]), i) for i in range(len(view)))
    spot = next(s for s, (_, _, i) in enumerate(active) if i == j)
    proven = float(attained[j])
    for klass, _, i in active[max(spot - 3, 0) : spot + 4]:
        if i != j and klass == mine[0] and abs(view.submit_s[i] - view.submit_s[j]) < 10:
            proven = max(proven, 0.9 * float(attained[i]))
    past = list(zip(*(c.tolist() for c in _columns(view.history)), strict=True))
    if len(past) < 3:
        return 3600 + proven, proven
    before = [row for row in past if row[0] == mine[0] and row[1] < mine[1]][-6:]
    after = [row for row in past if row[0] == mine[0] and row[1] >= mine[1]][:6]
    sample = [(size, 1 / (1 + abs(s - view.submit_s[j]) / 60)) for _, _, s, size in before + after]
    close = [size for _, _, s, size in before + after if abs(s - view.submit_s[j]) < 30 and size > 0.9 * attained[j]]
    own = sorted(size for klass, _, _, size in past if klass == mine[0])
    usual = own if len(own) >= 3 else sorted(size for *_, size in past)
    quantiles = [usual[int((k + 0.5) / 12 * len(usual))] for k in range(12)]
    sample += [(size, 0.05 / 12) for size in quantiles]
    sample.append((2 * max(proven, quantiles[-1], 1.0), 0.01))
    sample = [(size, weight) for size, weight in sample if size > proven]
    left = math.inf
    for limit, _ in sample:
        spent = sum(weight * (min(size, limit) - float(attained[j])) for size, weight in sample)
        ends = sum(weight for size, weight in sample if size <= limit)
        left = min(left, spent / ends)
    if not close and len(own) >= 3:
        alike = min(0.9, max(0.0, 2 * own[0] / max(own[len(own) // 2], 1e-12) - 1))
        return left, max(proven, alike * own[0])
    if not close:
        return left, proven
    return left, max(float(attained[j]), min(0.9, min(close) / max(close)) * min(close))


def _columns(history: History) -> tuple[np.ndarray, ...]:
    return history.klass, history.job, history.submit_s, history.size_s


@st.composite
def pasts(draw: st.DrawFn) -> History:
    """Finished jobs of three classes; sizes and submissions come close to each other and to those of active jobs."""
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from([0.0, 5.0, 20.0, 50.0, 4000.0]), st.integers(1, 300)),
            max_size=20,
        )
    )
    return finished(*((klass, number, submit, float(size)) for number, (klass, submit, size) in enumerate(rows)))


@settings(max_examples=60)
@given(view=snapshots(known=False), past=pasts(), reach=st.sampled_from([0.1, 1.0, 10.0]))
def test_as_defined(view: Snapshot, past: History, reach: float) -> None:
    view = msgspec.structs.replace(
        view, history=past, submit_s=np.minimum(view.submit_s - view.submit_s.min(initial=0.0), 60.0)
    )
    attained = np.round(np.minimum(view.ran_s, 100.0) * reach, 3)
    found = siblings.outlook(view, attained)
    for j in range(len(view)):
        left, least = by_definition(view, attained, j)
        assert found.left[j] == pytest.approx(left)
        assert found.least[j] == pytest.approx(least)
