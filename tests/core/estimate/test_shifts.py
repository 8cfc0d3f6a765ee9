"""A job whose speed shifts: a few odd windows change nothing, many in a row make everything else unknown."""

from __future__ import annotations

from stretto.core.estimate.curve import Curve, Window, measured, take_in


def window(workers: int, step_s: float) -> Window:
    return Window(workers=workers, count=8, median_s=step_s, spread_s=0.01 * step_s, began_s=0.0, ended_s=8 * step_s)


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
        curve = take_in(curve, window(4, 0.1))
    (only,) = measured(curve)
    assert only.workers == 4
    assert abs(only.step_s - 0.1) < 1e-3
