from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.backfill import Profile

STEPS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), max_size=6)
"""(end, GPUs given back then)."""
BOOKINGS = st.lists(st.tuples(st.integers(1, 8), st.sampled_from([0, 1, 2, 5, 9, math.inf])), max_size=8)
"""(GPUs needed, length)."""


class SlowProfile:
    """Looks at every half second up to a time at which all that ends has ended."""

    def __init__(self, free: int, ends: list[tuple[int, int]]) -> None:
        self.times = [i / 2 for i in range(400)]
        self.free = [free + sum(gives for end, gives in ends if end + 0.5 <= t) for t in self.times]

    def earliest(self, need: int, length_s: float) -> float:
        for i, at_s in enumerate(self.times):
            inside = [f for t, f in zip(self.times[i:], self.free[i:], strict=True) if t < at_s + max(length_s, 0.1)]
            if all(f >= need for f in inside):
                return at_s
        return math.inf

    def take(self, need: int, from_s: float, until_s: float) -> None:
        self.free = [f - need * (from_s <= t < until_s) for t, f in zip(self.times, self.free, strict=True)]


@given(st.integers(0, 4), STEPS, BOOKINGS)
def test_reservations_equal_a_search_over_all_moments(
    free: int, ends: list[tuple[int, int]], bookings: list[tuple[int, float]]
) -> None:
    slow = SlowProfile(free, ends)
    fast = Profile(
        0.0,
        free,
        np.array([end + 0.5 for end, _ in ends]),
        np.array([gives for _, gives in ends], np.int64),
        len(bookings),
    )
    for need, length_s in bookings:
        start_s = fast.earliest(need, length_s)
        assert start_s == slow.earliest(need, length_s)
        if start_s < math.inf:
            assert fast.free_at(start_s) >= need
            fast.take(need, start_s, start_s + length_s)
            slow.take(need, start_s, start_s + length_s)


def test_a_gap_too_short_by_rounding_only_is_long_enough() -> None:
    profile = Profile(0.0, 1, np.array([0.3]), np.array([1]), 2)
    profile.take(2, 0.3, 0.6)
    assert profile.earliest(1, 0.1 + 0.2) == 0.0  # 0.30000000000000004 s
    assert profile.earliest(1, 0.31) == 0.6
