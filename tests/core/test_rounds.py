"""When a round starts, and that lost room does not wait for it."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, view_of
from stretto.core import rounds
from stretto.core.reasons import Reason


@given(st.floats(0, 1e12), st.floats(1e-3, 1e6))
def test_the_next_round_is_later_but_not_by_more_than_one(now_s: float, round_s: float) -> None:
    due_s = rounds.next_start(now_s, round_s)
    assert due_s is not None
    assert now_s < due_s <= max(now_s + round_s * (1 + 1e-9), np.nextafter(now_s, np.inf) * (1 + 1e-9))


def test_rounds_start_at_multiples() -> None:
    assert [rounds.next_start(t, 60) for t in (0, 59.9, 60, 61)] == [60, 60, 120, 120]
    assert rounds.next_start(5, 0) is None


def test_everything_stays_until_the_round_unless_room_was_lost() -> None:
    view = view_of(4, [job(max_workers=4, workers=3), job()], now_s=70.0)
    assert rounds.too_early(view, 120.0)
    assert not rounds.too_early(view, 70.0)
    assert not rounds.too_early(view, None)
    smaller = msgspec.structs.replace(view, capacity=np.array([2000]))
    assert not rounds.too_early(smaller, 120.0)
    kept = rounds.keep(view, 120.0)
    assert kept.workers.tolist() == [3, 0]
    assert kept.wake_s == kept.memory == 120.0
    assert kept.reason.tolist() == [Reason.WAITS_FOR_ROUND] * 2
    assert kept.detail[:, 0].tolist() == [50.0, 50.0]
