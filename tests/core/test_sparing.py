"""Nobody is stopped for an equal a moment after its start."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core.cycle import LIVE, CycleState, decide
from stretto.core.decision import Decision
from stretto.core.reasons import Reason
from stretto.core.snapshot import IntArray, Snapshot
from stretto.core.sparing import FIRST_S, spare
from stretto.plugins import find


def decided(view: Snapshot, workers: IntArray) -> Decision:
    return Decision.of(view, workers, np.full(len(view), int(Reason.RUNS)))


def aged(view: Snapshot, *ages_s: float) -> Snapshot:
    return msgspec.structs.replace(view, changed_s=view.now_s - np.array(ages_s))


def new(workers: int = 2, **columns: Any) -> dict[str, Any]:
    return job(min_workers=1, max_workers=4, workers=workers, start_s=5.0, **columns)


def test_an_equal_waits_until_a_start_has_stood_for_a_moment() -> None:
    view = aged(view_of(2, [new(), job(size=2)]), 0.25, 9.0)
    spared = spare(view, decided(view, np.array([0, 2])))
    assert spared.workers.tolist() == [2, 0]
    assert spared.reason.tolist() == [Reason.JUST_STARTED, Reason.NO_ROOM]
    assert spared.wake_s == view.now_s + FIRST_S - 0.25
    later = aged(view, FIRST_S, 9.0)
    assert spare(later, decided(later, np.array([0, 2]))).workers.tolist() == [0, 2]


@given(st.floats(0.0, 1e6))
@example(255.069)
def test_when_it_is_thought_of_again_the_moment_is_over(started_s: float) -> None:
    """To the last bit: otherwise a simulation would think of it at this moment for ever."""
    view = msgspec.structs.replace(
        view_of(2, [new(), job(size=2)]), now_s=started_s, changed_s=np.array([started_s, 0.0])
    )
    again = msgspec.structs.replace(view, now_s=spare(view, decided(view, np.array([0, 2]))).wake_s)
    assert spare(again, decided(again, np.array([0, 2]))).workers.tolist() == [0, 2]


def test_more_urgent_jobs_take_its_place_at_once() -> None:
    view = aged(view_of(3, [new(), job(size=2, priority=1), job(size=1)]), 0.0, 9.0, 9.0)
    assert spare(view, decided(view, np.array([0, 2, 1]))).workers.tolist() == [0, 2, 1]


def test_no_more_jobs_wait_for_it_than_have_to() -> None:
    view = aged(view_of(5, [new(), job(size=2), job(size=3)]), 0.0, 9.0, 9.0)
    assert spare(view, decided(view, np.array([0, 2, 3]))).workers.tolist() == [2, 2, 0]


def test_a_resize_counts_where_it_is_a_stop_and_a_start() -> None:
    for resize_s, left in ((10.0, 2), (0.2, 1)):
        view = aged(view_of(2, [new(resize_s=resize_s), job(size=1)]), 0.0, 9.0)
        assert spare(view, decided(view, np.array([1, 1]))).workers[0] == left


def test_where_starts_cost_nothing_policies_do_as_they_like() -> None:
    view = aged(view_of(2, [job(workers=2, min_workers=1, max_workers=4), job(size=2)]), 0.0, 9.0)
    assert spare(view, decided(view, np.array([0, 2]))).workers.tolist() == [0, 2]


def test_what_was_lost_is_not_kept() -> None:
    """Room that has gone since it was started cannot be made by anybody who waits."""
    view = aged(view_of(1, [new()]), 0.0)
    assert spare(view, decided(view, np.array([0]))).workers.tolist() == [0]


@pytest.mark.parametrize("as_published", [False, True])
def test_the_cycle_spares_it(as_published: bool) -> None:
    long = job(size=2, workers=2, remaining=1e4, start_s=1.0)
    view = aged(view_of(2, [long, job(size=2, remaining=1.0)]), 0.1, 9.0)
    settings = msgspec.structs.replace(LIVE, placement="", stops_lose_work=as_published)
    outcome = decide(view, find("srtf", {}), CycleState(), settings)
    assert outcome.workers.tolist() == ([0, 2] if as_published else [2, 0])


@given(snapshots(), st.randoms(use_true_random=False))
def test_it_fits_and_takes_from_nobody_who_is_more_urgent(view: Snapshot, rng: Any) -> None:
    view = aged(view, *(rng.choice([0.0, 0.5, 2.0]) for _ in view.job))
    before = decide(view, find("srtf", {}), CycleState(), msgspec.structs.replace(LIVE, hysteresis=False, placement=""))
    decision = Decision.of(view, before.workers, before.reason, pool=np.maximum(before.pool, 0))
    spared = spare(view, decision)
    assert (view.used_milli(spared.workers, spared.pool) <= view.capacity).all()
    changed = spared.workers != decision.workers
    assert (spared.workers[changed] == view.workers[changed]).all()
    kept = spared.reason == Reason.JUST_STARTED
    waits = changed & ~kept
    assert (decision.workers[waits] > view.workers[waits]).all()
    if waits.any():
        assert view.priority[waits].max() <= view.priority[kept].max()
