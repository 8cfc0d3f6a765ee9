"""The learned speed-up: optimistic at first, right in the end, never absurd."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import (
    Curve,
    Model,
    Window,
    cap,
    fit,
    measured,
    observe,
    rates,
    sd_log,
    step_s,
    take_in,
)

TRUTHS = [
    Model(0.0, 1.0, 0.0),
    Model(0.05, 0.95, 0.0),
    Model(0.02, 0.9, 0.01),
    Model(0.3, 0.7, 0.0),
    Model(0.0, 20.0, 0.2),
]


def learned(truth: Model, sizes: list[int], each: int = 20, noise: float = 0.1, seed: int = 0) -> Curve:
    random = np.random.default_rng(seed)
    curve = Curve()
    for n in sizes:
        for _ in range(each):
            exact = float(truth.step_s(np.array([float(n)]))[0])
            curve = observe(curve, n, exact * math.exp(noise * random.standard_normal()))
    return curve


def true_rates(truth: Model, most: int) -> np.ndarray:
    n = np.arange(1, most + 1, dtype=float)
    return np.concatenate(([0.0], np.maximum.accumulate(1 / truth.step_s(n))))


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("seed", range(5))
def test_it_converges_to_the_true_curve_under_noise(truth: Model, seed: int) -> None:
    found = rates(learned(truth, [1, 2, 4, 8], seed=seed), 16)
    exact = true_rates(truth, 16)
    assert np.abs(found[1:9] / exact[1:9] - 1).max() < 0.1, "within what was seen"
    assert np.abs(found[9:] / exact[9:] - 1).max() < 0.3, "twice as far"


@pytest.mark.parametrize("truth", TRUTHS)
def test_without_noise_it_is_exact_where_it_was_seen(truth: Model) -> None:
    sizes = [1, 2, 4, 8]
    found = rates(learned(truth, sizes, noise=0.0), 8)
    assert np.allclose(found[sizes], true_rates(truth, 8)[sizes], rtol=0.02)


def test_before_any_data_and_with_one_size_it_expects_linear_scaling() -> None:
    assert rates(Curve(), 4).tolist() == [0, 1, 2, 3, 4]
    once = observe(Curve(), 2, 0.5)
    assert rates(once, 8).tolist() == pytest.approx([0, 1, 2, 3, 4, 5, 6, 7, 8])


@pytest.mark.parametrize("truth", TRUTHS[1:4])
def test_it_is_optimistic_beyond_what_was_seen_but_learns_from_each_size(truth: Model) -> None:
    exact = true_rates(truth, 16)[16]
    guesses = [rates(learned(truth, sizes, noise=0.0), 16)[16] for sizes in ([1], [1, 2, 4], [1, 2, 4, 8, 16])]
    assert guesses[0] >= guesses[1] >= 0.95 * exact
    assert guesses[2] == pytest.approx(exact, rel=0.05)


def test_earlier_runs_of_the_class_are_the_first_guess_and_own_data_overrule_them() -> None:
    saturating, linear = Model(0.5, 0.5, 0.0), Model(0.0, 1.0, 0.0)
    prior = learned(saturating, [1, 2, 4, 8], noise=0.0)
    assert np.allclose(rates(Curve(), 8, prior)[[1, 2, 4, 8]], true_rates(saturating, 8)[[1, 2, 4, 8]], rtol=0.1)
    twice_as_fast = observe(Curve(), 1, 0.5)
    assert rates(twice_as_fast, 8, prior)[8] == pytest.approx(2 * true_rates(saturating, 8)[8], rel=0.15)
    own = learned(linear, [1, 2, 4, 8], noise=0.0)
    assert rates(own, 8, prior)[8] == pytest.approx(8, rel=0.1)


def test_uncertainty_falls_with_data_and_grows_with_distance() -> None:
    truth = TRUTHS[1]
    few, many = learned(truth, [1, 2], each=2), learned(truth, [1, 2], each=50)
    assert sd_log(Curve(), 4) > sd_log(few, 2) > sd_log(many, 2) > 0
    assert sd_log(many, 2) < sd_log(many, 4) < sd_log(many, 16)
    assert sd_log(Curve(), 2, prior=many) < sd_log(Curve(), 2)
    assert sd_log(few, 2, prior=many) <= sd_log(Curve(), 2, prior=many)


def test_it_follows_a_change_of_speed() -> None:
    curve = learned(Model(0.0, 1.0, 0.0), [1], each=500, noise=0.02)
    for _ in range(400):
        curve = observe(curve, 1, 2.0)
    assert rates(curve, 1)[1] == pytest.approx(0.5, rel=0.1)


def test_one_slow_step_does_not_spoil_it() -> None:
    curve = learned(Model(0.0, 1.0, 0.0), [1], each=20, noise=0.05)
    assert rates(observe(curve, 1, 500.0), 1)[1] == pytest.approx(rates(curve, 1)[1], rel=0.05)


# Windows.


def window(workers: int, median_s: float, count: int = 8, spread_s: float = 0.0) -> Window:
    return Window(workers, count, median_s, spread_s, 0.0, count * median_s)


def test_a_window_counts_as_many_steps_as_it_has() -> None:
    once = take_in(Curve(), window(2, 0.5, count=40, spread_s=0.05))
    (size,) = measured(once)
    assert (size.workers, size.steps) == (2, 40)
    assert size.step_s == pytest.approx(0.5)
    assert size.sd_log == pytest.approx(0.1)
    assert size.standard_error == pytest.approx(0.1 / math.sqrt(40))
    (both,) = measured(take_in(once, window(2, 0.5, count=120, spread_s=0.05)))
    assert (both.steps, both.sd_log) == (160, pytest.approx(0.1))


def test_windows_that_differ_are_spread_too() -> None:
    curve = Curve()
    for median_s in (0.9, 1.1) * 10:
        curve = take_in(curve, window(1, median_s, spread_s=0.01))
    (size,) = measured(curve)
    assert size.step_s == pytest.approx(1.0, rel=0.02)
    assert size.sd_log == pytest.approx(0.1, rel=0.1)


def test_a_single_window_is_believed_and_the_sizes_beside_it_follow_the_formula() -> None:
    curve = take_in(take_in(Curve(), window(1, 1.0)), window(2, 0.9))
    found = rates(curve, 8)
    assert found[[1, 2]] == pytest.approx([1.0, 1 / 0.9], rel=0.02)
    assert found[8] < 1.5, "no doubling after one that was not"


def test_what_is_older_fades_whatever_windows_are_like() -> None:
    curve = Curve()
    for _ in range(1000):
        curve = take_in(curve, window(1, 0.01, count=50))
    for _ in range(300):
        curve = take_in(curve, window(1, 0.02, count=40))
    (size,) = measured(curve)
    assert size.steps == 100 * 40
    assert size.step_s == pytest.approx(0.02, rel=0.1)


@given(st.lists(st.tuples(st.integers(-1, 5), st.floats(), st.integers(-1, 10**9), st.floats()), max_size=20))
def test_windows_that_cannot_be_teach_nothing(given_windows: list[tuple[int, float, int, float]]) -> None:
    curve = Curve()
    for workers, median_s, count, spread_s in given_windows:
        before = curve
        curve = take_in(curve, window(workers, median_s, count, spread_s))
        possible = workers > 0 and 0 < median_s < math.inf and count > 0 and 0 <= spread_s < math.inf
        assert possible or curve is before
    for size in measured(curve):
        assert 0 < size.step_s < math.inf
        assert 0 <= size.standard_error < math.inf
    assert np.isfinite(rates(curve, 8)).all()


@pytest.mark.parametrize(
    "stored",
    [
        {"workers": [1, 2], "count": [3.0], "mean": [0.0], "squares": [0.0]},
        {"workers": [1], "count": [0.0], "mean": [0.0], "squares": [0.0]},
        {"workers": [1], "count": [1.0], "mean": [0.0], "squares": [-1.0]},
        {"workers": [1], "count": [1.0], "mean": [1e3], "squares": [0.0]},
        {"workers": [1], "count": [1.0], "mean": [-1e3], "squares": [0.0]},
        {"workers": [0], "count": [1.0], "mean": [0.0], "squares": [0.0]},
        {"workers": [10**9], "count": [1.0], "mean": [0.0], "squares": [0.0]},
        {"workers": [2, 1], "count": [1.0, 1.0], "mean": [0.0, 0.0], "squares": [0.0, 0.0]},
        {"workers": [2, 2], "count": [1.0, 1.0], "mean": [0.0, 0.0], "squares": [0.0, 0.0]},
    ],
)
def test_what_is_no_curve_is_not_read(stored: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(stored, Curve)


@pytest.mark.parametrize("name", ["count", "mean", "squares"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_curve_is_made_of_numbers(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(**({"workers": (1,), "count": (1.0,), "mean": (0.0,), "squares": (0.0,)} | {name: (wrong,)}))  # type: ignore[arg-type]


def test_explore_by_doubling() -> None:
    assert [cap(seen, 16) for seen in (0, 1, 2, 4, 8, 16)] == [1, 2, 4, 8, 16, 16]
    assert cap(0, 16, min_workers=4) == 4
    assert cap(3, 5) == 5


observations = st.lists(
    st.tuples(
        st.integers(-1, 70),
        st.one_of(st.floats(), st.floats(1e-6, 1e4), st.sampled_from([0.0, 1e-300, 1e300, math.nan, -1.0])),
    ),
    max_size=25,
)


@given(seen=observations, earlier=observations, most=st.integers(0, 70))
def test_rates_are_never_nan_never_negative_and_never_fall(
    seen: list[tuple[int, float]], earlier: list[tuple[int, float]], most: int
) -> None:
    curve, prior = Curve(), Curve()
    for workers, seconds in seen:
        before = curve
        curve = observe(curve, workers, seconds)
        assert msgspec.json.decode(msgspec.json.encode(curve), type=Curve) == curve
        assert before == Curve() or before.workers, "values are never changed in place"
    for workers, seconds in earlier:
        prior = observe(prior, workers, seconds)
    for some in (None, prior):
        found = rates(curve, most, some)
        assert found.shape == (most + 1,)
        assert found[0] == 0
        assert np.isfinite(found).all()
        assert (np.diff(found) >= 0).all()
        assert (found[1:] > 0).all()
        assert 0 < sd_log(curve, max(most, 1), some) < math.inf
    model = fit(curve, prior)
    assert min(model.serial, model.parallel, model.sync) >= 0


@given(st.permutations([(1, 1.0), (2, 0.6), (4, 0.35), (1, 1.1), (2, 0.5)]))
def test_the_order_of_a_few_observations_does_not_matter(seen: list[tuple[int, float]]) -> None:
    curve = Curve()
    for workers, seconds in seen:
        curve = observe(curve, workers, seconds)
    exact = Curve()
    for workers, seconds in sorted(seen):
        exact = observe(exact, workers, seconds)
    assert np.allclose(rates(curve, 8), rates(exact, 8))


def test_a_slower_larger_size_is_not_held_against_smaller_ones() -> None:
    curve = Curve()
    for n, seconds in ((1, 1.0), (2, 0.6), (4, 0.9)):
        for _ in range(10):
            curve = observe(curve, n, seconds)
    found = rates(curve, 4)
    assert found[4] == found[3] >= found[2] == pytest.approx(1 / 0.6, rel=0.15)
    assert step_s(curve, np.array([4.0]))[0] == pytest.approx(0.9, rel=0.15)


def varied(workers: int, typical_s: float, count: int, slow: int, slow_s: float) -> Window:
    """So many usual steps, and in between some that took that long each."""
    return Window(workers, count, typical_s, 0.0, 0.0, 1.0, typical_s, slow, slow * slow_s)


def test_slow_steps_that_come_again_are_a_part_of_the_mean() -> None:
    curve = Curve()
    for _ in range(10):
        curve = curves.take_in(curve, varied(1, 0.005, 54, 6, 0.5))
    (one,) = curves.measured(curve)
    assert one.step_s == pytest.approx((54 * 0.005 + 6 * 0.5) / 60, rel=0.05)
    assert one.sd_log > 0.3, "and they make it unsure"


def test_a_single_slow_step_is_a_hiccup() -> None:
    curve = curves.take_in(Curve(), varied(1, 0.1, 8, 1, 30.0))
    for _ in range(50):
        curve = curves.take_in(curve, varied(1, 0.1, 8, 0, 0.0))
    assert [one.step_s for one in curves.measured(curve)] == [pytest.approx(0.1)]
    many = Curve()
    for _ in range(100):
        many = curves.take_in(many, varied(1, 0.1, 99, 1, 0.4))
    assert [one.step_s for one in curves.measured(many)] == [pytest.approx(0.1)], "few, and hardly slower"


def test_a_size_is_not_faster_for_want_of_an_evaluation() -> None:
    """Two seconds after fifty steps, at every size; at two workers none was seen yet."""
    curve = Curve()
    for _ in range(10):
        curve = curves.take_in(curve, varied(1, 0.1, 50, 1, 2.0))
    curve = curves.take_in(curve, varied(2, 0.05, 16, 0, 0.0))
    one, two = curves.measured(curve)
    assert one.step_s == pytest.approx(0.1 + 2 / 51, rel=0.1)
    assert two.step_s == pytest.approx(0.05 + 2 / 51, rel=0.1)


def test_slow_steps_that_scale_are_seen_to() -> None:
    curve = Curve()
    for _ in range(8):
        for workers in (1, 2, 4):
            curve = curves.take_in(curve, varied(workers, 0.005 / workers, 54, 6, 0.5 / workers))
    one, two, four = curves.measured(curve)
    assert one.step_s / two.step_s == pytest.approx(2.0, rel=0.2)
    assert one.step_s / four.step_s == pytest.approx(4.0, rel=0.3)


def test_steps_that_vary_count_with_their_mean() -> None:
    window = Window(1, 30, 0.03, 0.02, 0.0, 1.0, mean_s=0.04)
    assert window.rate == pytest.approx(25.0)
    assert msgspec.structs.replace(window, spread_s=0.005).rate == pytest.approx(1 / 0.03)
