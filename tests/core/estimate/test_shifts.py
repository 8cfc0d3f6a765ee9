"""A job whose speed shifts: a few odd windows change nothing, many in a row make everything else unknown. One whose
speed always wanders is not measured anew all the time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.core import exploring
from stretto.core.estimate.curve import Curve, Window, measured, take_in


def window(workers: int, step_s: float, at_s: float = 0.0) -> Window:
    return Window(workers, 8, step_s, 0.01 * step_s, at_s, at_s + 8 * step_s)


def seen() -> Curve:
    curve = Curve()
    for workers, step_s in ((1, 0.1), (2, 0.06), (4, 0.04)):
        for _ in range(3):
            curve = take_in(curve, window(workers, step_s))
    return curve


def test_a_few_odd_windows_change_nothing() -> None:
    curve = seen()
    for _ in range(4):
        curve = take_in(curve, window(4, 0.08))
    curve = take_in(curve, window(4, 0.04))
    assert abs(curve.strange) <= 1
    assert [one.workers for one in measured(curve)] == [1, 2, 4]


def test_many_in_a_row_make_everything_else_unknown() -> None:
    curve = seen()
    for _ in range(5):
        curve = take_in(curve, window(4, 0.1, 100.0))
    (only,) = measured(curve)
    assert only.workers == 4
    assert abs(only.step_s - 0.1) < 1e-3


def test_what_has_just_been_explored_is_not_explored_again_at_once() -> None:
    """Sixteen steps at one and two workers cost about a second: it is left alone for ten times as long."""
    curve = seen()
    for at_s in (2.0, 3.0, 4.0, 5.0, 6.0):
        curve = take_in(curve, window(4, 0.1, at_s))
    assert len(measured(curve)) == 3
    assert len(measured(take_in(curve, window(4, 0.1, 12.9)))) == 1


class Wandering:
    """A job that scales; its speed wanders by so much, slowly, and is really another one after a while."""

    def __init__(self, sd: float, seed: int, shift: float = 1.0) -> None:
        self.random, self.sd, self.shift = np.random.default_rng(seed), sd, shift
        self.off = self.now_s = 0.0
        self.curve, self.size = Curve(), 1
        self.resets = self.resizes = 0

    def run(self, windows: int = 1000) -> None:
        kept = math.exp(-8 / 100)
        for i in range(windows):
            self.off = kept * self.off + math.sqrt(1 - kept**2) * self.sd * float(self.random.standard_normal())
            step_s = 0.1 / self.size**0.8 * math.exp(self.off) * (self.shift if i >= windows // 2 else 1.0)
            before, self.curve = self.curve, take_in(self.curve, window(self.size, step_s, self.now_s))
            self.now_s += 8 * step_s
            self.resets += len(self.curve.workers) < len(before.workers)
            wanted = exploring.next_size(self.curve, 1, 8, lambda n: n)
            wanted = wanted or exploring.best(measured(self.curve)).workers
            self.resizes, self.size = self.resizes + (wanted != self.size), wanted


@pytest.mark.parametrize("sd", [0.05, 0.12, 0.2])
def test_a_speed_that_wanders_is_not_measured_anew_all_the_time(sd: float) -> None:
    for seed in range(3):
        job = Wandering(sd, seed)
        job.run()
        assert job.resets <= 1
        assert job.resizes <= 8


@pytest.mark.parametrize("shift", [0.4, 2.5])
def test_a_real_shift_is_found_though_the_speed_wanders(shift: float) -> None:
    for seed in range(3):
        job = Wandering(0.05, seed, shift)
        job.run()
        assert 1 <= job.resets <= 2
