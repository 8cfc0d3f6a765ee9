"""Which steps count, and what is said of them. The clock is driven by hand."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.pace import Pace, Window, spread_s


class Worker:
    """Steps that take as long as it is told; keeps the windows."""

    def __init__(self, generation: int = 1, members: int = 1, first_steps: int = 8) -> None:
        self.now_s = 100.0
        self.windows: list[Window] = []
        self.pace = Pace(lambda: self.now_s, first_steps)
        self.pace.enter(generation, members)

    def steps(self, *lengths_s: float, counts: bool = True) -> None:
        for length_s in lengths_s:
            self.now_s += length_s
            window = self.pace.step(counts=counts)
            self.windows += [window] if window is not None else []

    def settled(self) -> Worker:
        """The two steps after a switch are behind it."""
        self.steps(5.0, 5.0)
        return self


def test_a_window_is_eight_steps_that_take_long_enough() -> None:
    worker = Worker(generation=3, members=2).settled()
    worker.steps(*[0.1] * 7)
    assert not worker.windows
    worker.steps(0.1)
    (window,) = worker.windows
    assert (window.number, window.generation, window.members, window.count, window.first) == (1, 3, 2, 8, True)
    assert window.median_s == pytest.approx(0.1)
    assert window.spread_s == pytest.approx(0.0)
    assert (window.began_s, window.ended_s) == pytest.approx((110.0, 110.8))


def test_a_first_impression_of_a_generation_comes_sooner() -> None:
    worker = Worker(first_steps=3).settled()
    worker.steps(*[0.15] * 19)
    assert [(window.count, window.first) for window in worker.windows] == [(3, True), (8, False), (8, False)]
    quick = Worker(first_steps=3).settled()
    quick.steps(*[0.01] * 29)
    assert not quick.windows


def test_quick_steps_fill_a_third_of_a_second() -> None:
    worker = Worker().settled()
    worker.steps(*[0.01] * 29)
    assert not worker.windows
    worker.steps(0.01, 0.01)
    assert [window.count for window in worker.windows] in ([30], [31])


def test_three_slow_steps_are_enough() -> None:
    worker = Worker().settled()
    worker.steps(16.0, 16.0)
    assert not worker.windows
    worker.steps(16.0)
    assert [window.count for window in worker.windows] == [3]


def test_a_window_follows_the_other() -> None:
    worker = Worker().settled()
    worker.steps(*[0.1] * 24)
    assert [(window.number, window.first) for window in worker.windows] == [(1, True), (2, False), (3, False)]
    assert [window.began_s for window in worker.windows[1:]] == [window.ended_s for window in worker.windows[:-1]]


def test_the_two_steps_after_a_switch_do_not_count() -> None:
    worker = Worker()
    worker.steps(0.5, 0.5, *[0.1] * 8)
    assert [(window.count, window.median_s) for window in worker.windows] == [(8, pytest.approx(0.1))]


def test_a_switch_drops_the_window_under_way_and_what_it_took_itself() -> None:
    """And so a step that was taken back, since that always ends in a switch."""
    worker = Worker().settled()
    worker.steps(*[0.1] * 7)
    worker.now_s += 3.0
    worker.pace.enter(2, 4)
    worker.steps(0.3, 0.3, *[0.05] * 7)
    assert not worker.windows
    worker.steps(0.05)
    (window,) = worker.windows
    assert (window.generation, window.members, window.first) == (2, 4, True)
    assert window.median_s == pytest.approx(0.05)


def test_numbers_ascend_over_generations_and_each_has_a_first() -> None:
    worker = Worker().settled()
    worker.steps(*[0.1] * 16)
    worker.pace.enter(2, 1)
    worker.settled().steps(*[0.1] * 16)
    told = [(window.number, window.generation, window.first) for window in worker.windows]
    assert told == [(1, 1, True), (2, 1, False), (3, 2, True), (4, 2, False)]


def test_steps_while_newcomers_are_brought_in_or_with_a_checkpoint_do_not_count() -> None:
    worker = Worker().settled()
    worker.steps(*[0.1] * 4)
    worker.steps(0.25, 0.25, 0.25, counts=False)
    worker.steps(*[0.1] * 4)
    (window,) = worker.windows
    assert (window.count, window.median_s) == (8, pytest.approx(0.1))
    assert window.ended_s - window.began_s == pytest.approx(1.55), "the time that it spans is all of it"


def test_what_the_script_does_between_two_loops_is_no_step() -> None:
    worker = Worker().settled()
    worker.steps(*[0.1] * 4)
    worker.now_s += 60.0
    worker.pace.begin()
    worker.steps(*[0.1] * 4)
    assert [(window.count, window.median_s) for window in worker.windows] == [(8, pytest.approx(0.1))]


def test_a_step_with_an_evaluation_in_its_body_does_not_count() -> None:
    worker = Worker().settled()
    worker.steps(0.1, 0.1, 2.0, 0.1, 0.1, 0.1, 0.1, 0.1)
    assert not worker.windows, "seven steps and an evaluation"
    worker.steps(0.1)
    (window,) = worker.windows
    assert (window.count, window.spread_s) == (8, pytest.approx(0.0))
    assert (window.slow, window.slow_s) == (1, pytest.approx(2.0)), "it is told apart"
    worker.steps(*[0.1] * 8)
    assert worker.windows[1].slow == 0


def test_what_the_steps_of_a_window_took_is_told_whole() -> None:
    worker = Worker().settled()
    worker.steps(*([0.005] * 9 + [0.5]) * 20)
    assert worker.windows
    for window in worker.windows:
        assert (window.median_s, window.mean_s) == (pytest.approx(0.005), pytest.approx(0.005))
        took_s = window.count * window.mean_s + window.slow_s
        assert took_s == pytest.approx(window.ended_s - window.began_s)
        assert took_s / (window.count + window.slow) == pytest.approx(0.0545, rel=0.25)


def test_steps_that_vary_count_all_the_same() -> None:
    worker = Worker().settled()
    worker.steps(0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2)
    (window,) = worker.windows
    assert (window.count, window.median_s) == (8, pytest.approx(0.15))
    assert window.spread_s == pytest.approx(1.4826 * 0.05)


@given(st.floats(0.001, 10.0), st.floats(0.0, 0.3))
def test_the_spread_is_a_standard_deviation(mean_s: float, relative: float) -> None:
    steps_s = [statistics.NormalDist(mean_s, mean_s * relative or 1e-12).inv_cdf((i + 0.5) / 999) for i in range(999)]
    assert spread_s(steps_s) == pytest.approx(mean_s * relative, rel=0.02, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.booleans()), max_size=120))
def test_windows_are_whole_and_lie_one_after_the_other(lengths: list[tuple[float, bool]]) -> None:
    worker = Worker()
    for length_s, counts in lengths:
        worker.steps(length_s, counts=counts)
    counted = sum(counts for _, counts in lengths[2:])
    assert sum(window.count for window in worker.windows) <= counted
    for before, after in zip(worker.windows, worker.windows[1:], strict=False):
        assert before.ended_s <= after.began_s + 1e-9
    for window in worker.windows:
        assert window.count >= 8 or (window.count >= 3 and window.ended_s - window.began_s >= 30 - 1e-6)
        assert window.median_s > 0
        assert window.median_s * window.count / 2 <= window.ended_s - window.began_s + 1e-6
