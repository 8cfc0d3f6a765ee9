"""Work and time left, with their uncertainty."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core.estimate.curve import Curve, observe
from stretto.core.estimate.history import Length
from stretto.core.estimate.remaining import expected_steps, left_of, left_of_hints, mean_left_s, remaining
from stretto.core.snapshot import History, Snapshot


def seen(*sizes: tuple[int, float]) -> Curve:
    curve = Curve()
    for workers, seconds in sizes:
        for _ in range(30):
            curve = observe(curve, workers, seconds)
    return curve


def test_a_known_total_leaves_only_the_speed_uncertain() -> None:
    left = remaining(1000, 400.0, seen((2, 0.5)), 2)
    assert (left.steps, left.steps_sd) == (600.0, 0.0)
    assert left.seconds == pytest.approx(300.0)
    assert 0 < left.seconds_sd < 0.1


def test_nothing_left_takes_no_time_and_no_workers_for_ever() -> None:
    assert remaining(100, 100.0, Curve(), 0).seconds == 0.0
    assert remaining(100, 130.0, Curve(), 2).seconds == 0.0
    assert remaining(100, 0.0, Curve(), 0).seconds == math.inf


def test_an_estimated_total_is_corrected_by_what_was_outlived() -> None:
    total = Length(math.log(1000.0), 0.3, "median")
    means = [left_of(total, done)[0] for done in (0.0, 500.0, 900.0)]
    assert means[0] > means[1] > means[2] > 0
    assert means[1] == pytest.approx(1000.0 * math.exp(0.045) - 500.0, rel=0.1)
    outlived, spread = left_of(total, 50_000.0)
    assert outlived == 50_000.0
    assert spread >= 1.0


def test_a_wide_estimate_grows_when_it_is_outlived() -> None:
    """Of a log-normal with a heavy tail more is expected to be left the longer it lasts."""
    wide = Length(0.0, 1.5, "nothing")
    assert left_of(wide, 10.0)[0] > left_of(wide, 1.0)[0]


def test_a_hint_is_its_mean_and_who_outlives_it_lasts_as_long_again() -> None:
    sd = np.full(4, 0.7)
    mean_log = np.log(np.full(4, 100.0)) - sd**2 / 2
    left, spread = left_of_hints(mean_log, sd, np.array([0.0, 50.0, 100.0, 700.0]))
    assert left[[0, 2, 3]].tolist() == pytest.approx([100.0, 100.0, 700.0])
    assert 50 < left[1] < 100
    assert spread[0] < spread[2] == spread[3] == 1.0


@given(st.floats(-5, 20), st.floats(0.05, 2.0), st.floats(0, 1e9))
def test_left_of_is_always_a_sensible_number(mean: float, sd: float, done: float) -> None:
    left, spread = left_of(Length(mean, sd, "regression"), done)
    assert 0 < left < math.inf
    assert 0 <= spread < 15


@given(mean=st.floats(0, 8), sd=st.floats(0.1, 1.2), share=st.floats(0.05, 0.95))
def test_left_of_against_many_draws(mean: float, sd: float, share: float) -> None:
    draws = np.exp(mean + sd * np.random.default_rng(0).standard_normal(40_000))
    done = float(np.quantile(draws, share))
    longer = draws[draws > done] - done
    assert left_of(Length(mean, sd, "median"), done)[0] == pytest.approx(longer.mean(), rel=0.15)


def test_what_finished_jobs_had_left() -> None:
    sizes = np.array([10.0, 20.0, 60.0])
    assert mean_left_s(sizes, 0.0) == 30.0
    assert mean_left_s(sizes, 15.0) == 25.0
    assert mean_left_s(sizes, 100.0) == 100.0
    assert mean_left_s(np.empty(0), 0.0) == 60.0


def test_an_unknown_length_is_judged_by_its_class() -> None:
    history = History().adding(0, 1, 0.0, 100.0).adding(1, 2, 0.0, 900.0)
    jobs = [
        job(remaining=math.nan, klass=0),
        job(remaining=math.nan, klass=1),
        job(remaining=7.0),
        job(remaining=math.nan, klass=5),
    ]
    view = view_of(8, jobs, history=history)
    assert expected_steps(view).tolist() == [100.0, 900.0, 7.0, 500.0]
    older = msgspec.structs.replace(view, done=np.array([60.0, 0.0, 0.0, 0.0]))
    assert expected_steps(older)[0] == 40.0


@given(view=snapshots(pools=2))
def test_expected_steps_are_never_nan(view: Snapshot) -> None:
    steps = expected_steps(view)
    assert np.isfinite(steps).all()
    assert (steps >= 0).all()
    known = ~np.isnan(view.remaining)
    assert np.array_equal(steps[known], view.remaining[known])
