"""Rests between decisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.server.pacing import Rest


def test_a_single_decision_is_soon_followed_and_a_burst_makes_the_rests_longer() -> None:
    rest = Rest()
    lengths = []
    for _ in range(4):
        rest = rest.after(max(rest.over_s, 100.0), max(rest.over_s, 100.0) + 1.0, 1.0)
        lengths.append(rest.length_s)
    assert lengths == [1.0, 2.0, 4.0, 4.0]
    later_s = rest.over_s + rest.length_s
    assert rest.after(later_s, later_s + 1.0, 1.0).length_s == 1.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 5)), min_size=1, max_size=30))
def test_decisions_never_take_more_than_half_of_the_time(asked: list[tuple[float, float]]) -> None:
    """However they are asked for, from the end of one rest to the end of the next."""
    rest, now_s = Rest(), 0.0
    for idle_s, took_s in asked:
        began_s = max(now_s, rest.over_s) + idle_s
        rest = rest.after(began_s, began_s + took_s, took_s)
        now_s = began_s + took_s
        assert rest.over_s - now_s >= 0.999 * took_s
        assert rest.length_s <= 4 * took_s
