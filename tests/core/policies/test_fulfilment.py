from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import answer, check_ends, check_uncontended, need_of, run, why, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.decision import Decision
from stretto.core.handout import useful
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim.trace import Trace

NAME = "fulfilment"


def after(view: Snapshot, decision: Decision) -> Snapshot:
    """The world once the decision was carried out."""
    pool = np.where(decision.workers > 0, decision.pool, -1)
    return msgspec.structs.replace(view, workers=decision.workers, pool=pool)


def test_two_jobs_of_four_on_six_gpus_overlap() -> None:
    result = run(NAME, trace_of([{"max_workers": 4, "work": 24}] * 2), "1x6")
    assert result.finish_s.tolist() == [8, 8]


def test_the_least_fulfilled_grows() -> None:
    """Of 1..3 and 1..9 on 8: scores rise by 1/2 and 1/8; at 2/4 each the earlier gets the last worker."""
    assert workers_of(NAME, view_of(8, [job(max_workers=3), job(max_workers=9)])) == [3, 5]


def test_a_newcomers_minimum_is_taken_from_the_most_fulfilled() -> None:
    """The first is at 1, gives one; then both are at 1/2 and the later gives one."""
    jobs = [job(max_workers=3, workers=3), job(max_workers=9, workers=5), job(size=2)]
    decision = answer(NAME, view_of(8, jobs))
    assert decision.workers.tolist() == [2, 4, 2]
    assert why(decision, 2) is Reason.AT_MAXIMUM


def test_nobody_is_stopped_for_a_newcomer() -> None:
    decision = answer(NAME, view_of(4, [job(min_workers=3, max_workers=4, workers=4), job(size=2)]))
    assert decision.workers.tolist() == [4, 0]
    assert why(decision, 1) is Reason.NO_ROOM
    assert decision.detail[1].tolist() == [2, 1]


def test_headroom_is_whole_gpus_and_open_to_minimums() -> None:
    wide = job(max_workers=200)
    assert workers_of(NAME, view_of(100, [wide])) == [97]
    assert workers_of(NAME, view_of(10, [wide], 0), max_load_desired=0.9) == [9]
    assert workers_of(NAME, view_of(10, [wide])) == [10]
    assert workers_of(NAME, view_of(100, [wide | {"workers": 97}, job(size=3)])) == [94, 3]
    assert workers_of(NAME, view_of(100, [job(min_workers=97, max_workers=200, workers=97), job(size=3)])) == [97, 3]


def test_there_is_no_headroom_when_all_can_have_their_maximum() -> None:
    assert workers_of(NAME, view_of(100, [job(max_workers=60), job(max_workers=40)])) == [60, 40]


@settings(max_examples=150)
@given(snapshots(), st.sampled_from([0.3, 0.9, 0.97, 1.0]))
def test_no_livelock(view: Snapshot, load: float) -> None:
    """A decision on its own outcome changes nothing, at any load limit: growing never calls for shrinking."""
    decision = answer(NAME, view, max_load_desired=load)
    again = answer(NAME, after(view, decision), max_load_desired=load)
    assert again.workers.tolist() == decision.workers.tolist()


@given(snapshots(overfull=False), st.sampled_from([0.5, 0.97, 1.0]))
def test_running_jobs_run_on_and_only_minimums_pass_the_limit(view: Snapshot, load: float) -> None:
    workers = answer(NAME, view, max_load_desired=load).workers
    assert (workers[view.workers > 0] > 0).all()
    top = useful(view)
    if (need_of(view, top).sum() > view.total_milli) and (workers > view.min_workers).any():
        headroom = math.floor(round((1 - load) * view.total_milli / GPU, 9)) * GPU
        assert need_of(view, workers).sum() <= view.total_milli - headroom


@given(snapshots(overfull=False))
def test_who_grew_was_the_least_fulfilled(view: Snapshot) -> None:
    """Take the last worker away from one that grew: no other that could have had it is less fulfilled."""
    workers, top = answer(NAME, view, max_load_desired=1.0).workers, useful(view)
    for j in np.flatnonzero((workers > view.workers) & (workers > view.min_workers)).tolist():
        before = (workers[j] - 1 - view.min_workers[j]) / (top[j] - view.min_workers[j])
        for k in np.flatnonzero((workers > 0) & (workers < top) & (view.width <= view.width[j])).tolist():
            assert (workers[k] - view.min_workers[k]) / (top[k] - view.min_workers[k]) >= before


def test_a_frozen_job_is_left_alone_until_it_thaws() -> None:
    jobs = [job(max_workers=8, workers=8, changed_s=90.0), job(size=2, submit_s=100.0)]
    frozen = answer(NAME, view_of(8, jobs, now_s=100.0), freeze_s=30)
    assert frozen.workers.tolist() == [8, 0]
    assert frozen.wake_s == 120.0
    thawed = answer(NAME, view_of(8, jobs, now_s=120.0), freeze_s=30)
    assert thawed.workers.tolist() == [6, 2]


def test_nobody_stays_frozen_when_room_was_lost() -> None:
    jobs = [job(max_workers=8, workers=6, changed_s=90.0), job(max_workers=4, workers=2, submit_s=10.0)]
    assert workers_of(NAME, view_of(4, jobs, now_s=100.0), freeze_s=30) == [3, 1]


@given(snapshots(), st.sampled_from([0.0, 10.0, 1e6]))
def test_any_snapshot(view: Snapshot, freeze_s: float) -> None:
    answer(NAME, view, freeze_s=freeze_s)
    check_uncontended(NAME, view)


@pytest.mark.parametrize("settings", [{"max_load_desired": 0}, {"max_load_desired": 1.5}, {"freeze_s": -1}])
def test_options_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        answer(NAME, view_of(1, []), **settings)


@settings(max_examples=30)
@given(traces(), st.sampled_from([0.0, 7.0]))
def test_every_trace_ends(trace: Trace, freeze_s: float) -> None:
    assert not check_ends(NAME, trace, freeze_s=freeze_s).preemptions.any()
