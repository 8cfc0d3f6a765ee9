"""What is believed of untried sizes: little, one doubling up, and never more than was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.estimate import curve as curves
from stretto.core.estimate.belief import believed
from stretto.core.estimate.curve import Curve


def seen(speeds: dict[int, float], times: int = 20) -> Curve:
    """Measured so often at each of these sizes."""
    curve = Curve()
    for workers, speed in speeds.items():
        for _ in range(times):
            curve = curves.observe(curve, workers, 1 / speed)
    return curve


def one(own: Curve, prior: Curve | None = None, low: int = 1, high: int = 8, first: int = 1) -> list[float]:
    rates: list[float] = believed([own], [prior or Curve()], low, high, first=first)[0].tolist()
    return rates


def test_of_a_job_of_which_nothing_is_known() -> None:
    assert one(Curve(), high=4) == [0, 1, 1, 1, 1]
    assert one(Curve(), high=4, first=4) == pytest.approx([0, 1, 2**0.7, 3**0.7, 4**0.7])
    assert one(Curve(), low=2, high=4)[2:] == pytest.approx([2**0.7] * 3)


def test_one_size_promises_less_than_twice_as_much_one_doubling_up() -> None:
    assert one(seen({2: 10.0}))[2:] == pytest.approx([10, 10 * 1.5**0.7, 10 * 2**0.7, *[10 * 2**0.7] * 4], rel=1e-3)


def test_the_last_gain_goes_on_for_one_doubling() -> None:
    linear = one(seen({1: 10.0, 2: 20.0}), high=16)
    assert linear[4] == pytest.approx(40, rel=0.01)
    assert linear[5:] == pytest.approx([linear[4]] * 12)
    poor = one(seen({1: 10.0, 2: 12.0}))
    assert poor[4] == pytest.approx(12 * 1.2, rel=0.01)
    uneven = one(seen({1: 10.0, 3: 20.0}))
    assert uneven[6] == pytest.approx(20 * 2 ** (1 / np.log2(3)), rel=0.01)


def test_a_gain_that_may_be_chance_is_none() -> None:
    rates = one(seen({1: 10.0, 2: 10.2}))
    assert rates[4] == rates[2]


def test_a_curve_that_fell_is_said_to_fall() -> None:
    rates = one(seen({1: 10.0, 2: 18.0, 4: 12.0}))
    assert rates[1:3] == pytest.approx([10, 18], rel=0.02)
    assert rates[4] == pytest.approx(12, rel=0.02)
    assert rates[8] <= 12 * 12 / 18 * 1.02
    assert int(np.argmax(rates)) == 2


def test_a_class_is_scaled_to_the_job_and_widens_what_was_tried() -> None:
    alike = seen({1: 10.0, 2: 18.0, 4: 30.0})
    rates = one(seen({1: 5.0}), alike)
    assert rates[4] == pytest.approx(15, rel=0.05)
    assert rates[8] <= 15 * 30 / 18 * 1.05
    assert one(Curve(), alike)[4] == pytest.approx(30, rel=0.05)


def test_a_minimum_beyond_what_was_tried_is_believed_in() -> None:
    rates = one(Curve(), seen({1: 10.0}), low=4)
    assert rates[4] == pytest.approx(10 * 4**0.7, rel=0.01)
    assert rates[5:] == pytest.approx([rates[4]] * 4)


def test_other_pools_and_strangers_tell_the_speed() -> None:
    own = [seen({1: 10.0, 2: 18.0}), Curve(), Curve()]
    rates = believed(own, [Curve()] * 3, 1, 4, first=1, useless=(2,))
    assert rates[1].tolist() == pytest.approx(rates[0].tolist(), rel=0.02)
    assert not rates[2].any()
    alone = believed([Curve()], [Curve()], 2, 8, first=2, strangers=[seen({1: 5.0, 2: 9.0, 8: 20.0})])
    assert alone[0, 2:].tolist() == pytest.approx([9] * 7, rel=0.02), "the speed of others, not their shape"


@given(
    speeds=st.dictionaries(st.integers(1, 12), st.floats(0.01, 100), max_size=5),
    prior=st.dictionaries(st.integers(1, 12), st.floats(0.01, 100), max_size=5),
    low=st.integers(1, 4),
    more=st.integers(0, 12),
)
def test_no_gain_beyond_one_doubling_and_never_nonsense(
    speeds: dict[int, float], prior: dict[int, float], low: int, more: int
) -> None:
    high = low + more
    rates = np.array(one(seen(speeds, 2), seen(prior, 2), low, high, first=low))
    assert rates[0] == 0
    assert (rates[1:] > 0).all()
    assert np.isfinite(rates).all()
    widest = min(max([*speeds, *prior], default=0), high)
    top = curves.cap(widest, high, low)
    assert (rates[top:] == rates[top]).all()
    if widest:
        n = np.arange(widest, top + 1)
        assert (rates[n] <= rates[widest] * n / widest * (1 + 1e-9)).all(), "never better than linear"
