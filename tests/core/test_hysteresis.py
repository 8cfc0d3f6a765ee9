"""Resizes that do not pay are not made, and whoever is nearly done is left alone."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core.decision import Decision
from stretto.core.hysteresis import gain_s, settle
from stretto.core.reasons import Reason
from stretto.core.snapshot import IntArray, Snapshot


def decided(view: Snapshot, workers: IntArray, pool: IntArray | None = None) -> Decision:
    return Decision.of(view, workers, np.full(len(view), int(Reason.RUNS)), pool=pool)


def running(**columns: Any) -> dict[str, Any]:
    return job(min_workers=1, max_workers=8, workers=2, **columns)


def test_growth_must_gain_more_than_it_costs() -> None:
    view = view_of(8, [running(remaining=100.0, resize_s=20.0), running(remaining=100.0, resize_s=30.0)])
    grown = np.array([4, 4])
    assert gain_s(view, grown, np.zeros(2, np.int64)).tolist() == [25.0, 25.0]
    settled = settle(view, decided(view, grown))
    assert settled.workers.tolist() == [4, 2]
    assert settled.reason.tolist() == [Reason.RUNS, Reason.NOT_WORTH_RESIZE]
    assert settled.detail[1].tolist() == [25.0, 30.0]


def test_a_job_of_unknown_length_is_thought_of_again_when_it_has_run_twice_as_long() -> None:
    young = running(remaining=math.nan, resize_s=20.0, ran_s=4.0, done=1.0)
    view = view_of(8, [young, running(remaining=1000.0, resize_s=300.0, ran_s=2.0)])
    settled = settle(view, decided(view, np.array([4, 4])))
    assert settled.reason.tolist() == [Reason.NOT_WORTH_RESIZE] * 2
    assert settled.wake_s == view.now_s + 4.0


def test_starts_and_stops_are_never_held_back() -> None:
    view = view_of(4, [running(remaining=1e6, resize_s=10.0), job(size=4, remaining=1.0, resize_s=10.0)])
    decision = decided(view, np.array([0, 4]))
    assert settle(view, decision).workers.tolist() == [0, 4]


def test_a_job_shrinks_only_for_somebody() -> None:
    view = view_of(4, [running(remaining=1000.0, resize_s=1.0), job(size=3, remaining=10.0)])
    for_nobody = settle(view, decided(view, np.array([1, 0])))
    assert for_nobody.workers.tolist() == [2, 0]
    for_the_other = settle(view, decided(view, np.array([1, 3])))
    assert for_the_other.workers.tolist() == [1, 3]


def test_a_shrink_whose_beneficiary_was_held_back_is_not_made_either() -> None:
    jobs = [
        job(min_workers=1, max_workers=8, workers=4, remaining=1000.0, resize_s=1.0),
        running(remaining=4.0, resize_s=5.0),
    ]
    view = view_of(6, jobs)
    assert settle(view, decided(view, np.array([2, 4]))).workers.tolist() == [4, 2]


def test_a_nearly_finished_job_is_left_alone_where_there_is_room() -> None:
    view = view_of(4, [running(remaining=2.0, start_s=5.0)])
    settled = settle(view, decided(view, np.array([0])))
    assert settled.workers.tolist() == [2]
    assert settled.reason.tolist() == [Reason.NEARLY_DONE]
    assert settled.detail[0, 0] == 1.0
    full = view_of(2, [running(remaining=2.0, start_s=5.0), job(size=2)])
    assert settle(full, decided(full, np.array([0, 2]))).workers.tolist() == [0, 2]


@given(view=snapshots(pools=2, overfull=False), data=st.data())
def test_settling_never_takes_more_than_there_is(view: Snapshot, data: st.DataObject) -> None:
    free = view.capacity.copy()
    workers, pool = np.zeros(len(view), np.int64), np.zeros(len(view), np.int64)
    for j in range(len(view)):
        want = data.draw(st.sampled_from([0, *range(int(view.min_workers[j]), int(view.max_workers[j]) + 1)]))
        home = data.draw(st.integers(0, len(view.pools) - 1))
        need = int(want * view.width[j] + view.fixed_milli[j])
        if want and need <= free[home]:
            workers[j], pool[j] = want, home
            free[home] -= need
    settled = settle(view, decided(view, workers, pool))
    used = np.zeros(len(view.pools), np.int64)
    for j in range(len(view)):
        got = int(settled.workers[j])
        assert got in (int(workers[j]), int(view.workers[j]))
        if got:
            used[settled.pool[j]] += got * view.width[j] + view.fixed_milli[j]
        if not view.workers[j]:
            assert got == workers[j], "a start is never held back"
    assert (used <= view.capacity).all()
    assert not np.isnan(gain_s(view, workers, pool)).any()
    again = settle(view, settled)
    assert np.array_equal(again.workers, settled.workers)
    assert np.array_equal(with_pool(again), with_pool(settled))


def with_pool(decision: Decision) -> IntArray:
    return np.where(decision.workers > 0, decision.pool, -1)


def test_a_guess_at_a_length_is_too_little_to_keep_others_waiting_for() -> None:
    view = view_of(4, [running(remaining=2.0, remaining_sd=0.3, start_s=5.0)])
    assert settle(view, decided(view, np.array([0]))).workers.tolist() == [0]


@given(view=snapshots(pools=2, overfull=False))
def test_where_a_change_costs_nothing_everything_is_as_decided(view: Snapshot) -> None:
    free = msgspec.structs.replace(view, resize_s=np.zeros(len(view)), start_s=np.zeros(len(view)))
    decision = decided(free, np.zeros(len(view), np.int64))
    assert settle(free, decision).workers.tolist() == [0] * len(view)
