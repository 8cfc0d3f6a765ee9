"""How long the next run will be, from what its user wrote down."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.estimate.curve import Curve, observe
from stretto.core.estimate.history import ClassHistory, learn, length


def taught(rows: list[tuple[dict[str, Any], float]]) -> ClassHistory:
    history = ClassHistory()
    for features, size in rows:
        history = learn(history, features, size)
    return history


def test_nothing_known_one_run_known() -> None:
    nothing = length(ClassHistory(), {"epochs": 3}, default=100.0)
    assert (nothing.basis, nothing.size) == ("nothing", pytest.approx(100.0))
    once = length(taught([({"epochs": 3}, 50.0)]), {"epochs": 3})
    assert (once.basis, once.size) == ("one run", pytest.approx(50.0))
    assert once.sd_log < nothing.sd_log


@pytest.mark.parametrize("seed", range(6))
def test_six_runs_are_enough_to_order_sizes(seed: int) -> None:
    random = np.random.default_rng(seed)
    epochs = [1, 2, 3, 5, 8, 20]
    random.shuffle(epochs)
    history = taught(
        [({"epochs": e, "batch": 64}, 30.0 * e * math.exp(0.15 * random.standard_normal())) for e in epochs]
    )
    guesses = [length(history, {"epochs": e, "batch": 64}).size for e in (1, 4, 12, 30)]
    assert guesses == sorted(guesses)
    assert guesses[0] < 0.5 * guesses[2]


def test_a_law_in_several_inputs_is_found() -> None:
    random = np.random.default_rng(0)
    rows = []
    for _ in range(40):
        epochs, batch = int(random.integers(1, 50)), int(2 ** random.integers(4, 9))
        beside = int(random.integers(0, 10))
        model = str(random.choice(["resnet18", "resnet50"]))
        size = 100.0 * epochs / batch * (3 if model == "resnet50" else 1) * (1 + 0.05 * beside)
        features = {"epochs": epochs, "batch": batch, "model": model, "concurrent": beside, "gpus": 1}
        rows.append((features, size * math.exp(0.1 * random.standard_normal())))
    asked = {"epochs": 30, "batch": 64, "model": "resnet50", "concurrent": 4, "gpus": 1}
    found = length(taught(rows), asked)
    exact = 100.0 * 30 / 64 * 3 * 1.2
    assert found.basis == "regression"
    assert found.size == pytest.approx(exact, rel=0.2)
    assert abs(math.log(exact) - found.mean_log) < 3 * found.sd_log
    assert found.sd_log < 0.3


def test_an_irregular_dependence_is_left_to_the_neighbours() -> None:
    sizes = {1: 10.0, 2: 1000.0, 3: 30.0, 4: 4000.0, 5: 3.0}
    history = taught([({"variant": variant}, size) for variant, size in sizes.items() for _ in range(4)])
    for variant, size in sizes.items():
        found = length(history, {"variant": variant})
        assert found.basis == "neighbours"
        assert found.size == pytest.approx(size, rel=0.5)


def test_features_that_say_nothing_leave_the_median() -> None:
    random = np.random.default_rng(1)
    rows = [({"gpus": 1, "user": "a"}, float(size)) for size in random.lognormal(5, 0.3, 30)]
    found = length(taught(rows), {"gpus": 1, "user": "a"})
    assert found.basis == "median"
    assert found.size == pytest.approx(math.exp(5), rel=0.2)
    assert 0.2 < found.sd_log < 0.5


def test_uncertainty_shrinks_with_runs() -> None:
    random = np.random.default_rng(2)
    rows = [({"epochs": e}, 10.0 * e * math.exp(0.1 * random.standard_normal())) for e in [1, 5, 2, 9, 3, 7] * 6]
    spreads = [length(taught(rows[:n]), {"epochs": 4}).sd_log for n in (0, 1, 6, 36)]
    assert spreads == sorted(spreads, reverse=True)


def test_an_outlier_does_not_turn_the_order_round() -> None:
    rows = [({"epochs": e}, 10.0 * e) for e in (1, 2, 4, 6, 8, 12, 16)]
    history = taught([*rows, ({"epochs": 1}, 100_000.0)])
    assert length(history, {"epochs": 1}).size < length(history, {"epochs": 10}).size


def test_an_unheard_of_value_is_not_taken_to_the_moon() -> None:
    history = taught([({"epochs": e}, 10.0 * e) for e in (1, 2, 4, 8)])
    assert length(history, {"epochs": 10**9}).size <= 80.0 * math.exp(3.0) * 1.001


def test_the_history_is_bounded_and_pools_curves() -> None:
    history = ClassHistory()
    for i in range(250):
        history = learn(history, {"i": i}, 1.0 + i, observe(Curve(), 1 + i % 2, 1.0))
    assert len(history.runs) == 200
    assert history.runs[-1].size == 250.0
    assert history.curve.workers == (1, 2)
    assert history.curve.count == (125.0, 125.0)


def test_sizes_that_cannot_be_teach_nothing() -> None:
    for size in (0.0, -1.0, math.nan, math.inf):
        assert learn(ClassHistory(), {}, size) == ClassHistory()


features = st.dictionaries(
    st.sampled_from(["epochs", "batch", "model", "gpus"]),
    st.one_of(st.integers(-3, 10**6), st.floats(), st.sampled_from(["a", "b", ""])),
)


@given(rows=st.lists(st.tuples(features, st.floats(1e-6, 1e12)), max_size=8), asked=features)
def test_it_never_says_nan(rows: list[tuple[dict[str, Any], float]], asked: dict[str, Any]) -> None:
    history = taught(rows)
    found = length(history, asked)
    assert math.isfinite(found.mean_log)
    assert 0 < found.sd_log < 10
    assert length(history, asked) == found
