"""When the policy is asked: events, rounds, wishes and rests."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.agenda import Agenda


def test_a_single_decision_is_soon_followed_and_a_burst_makes_the_rests_longer() -> None:
    agenda = Agenda()
    lengths = []
    for _ in range(4):
        began_s = max(agenda.rest_s, 100.0)
        agenda = agenda.answered(began_s, began_s + 1.0, 1.0, math.inf)
        lengths.append(agenda.length_s)
    assert lengths == [1.0, 2.0, 4.0, 4.0]
    later_s = agenda.rest_s + agenda.length_s
    assert agenda.answered(later_s, later_s + 1.0, 1.0, math.inf).length_s == 1.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 5)), min_size=1, max_size=30))
def test_decisions_never_take_more_than_half_of_the_time(asked: list[tuple[float, float]]) -> None:
    """However they are asked for, from the end of one rest to the end of the next."""
    agenda, now_s = Agenda(), 0.0
    for idle_s, took_s in asked:
        began_s = max(now_s, agenda.due_s()) + idle_s
        agenda = agenda.answered(began_s, began_s + took_s, took_s, math.inf).touched(began_s + took_s, rounds=False)
        now_s = began_s + took_s
        assert agenda.due_s() - now_s >= 0.999 * took_s
        assert agenda.length_s <= 4 * took_s


def test_events_wake_a_policy_at_once_but_one_of_rounds_waits_for_its_own_time() -> None:
    asked = Agenda().answered(10.0, 10.0, 0.0, 60.0)
    assert asked.due_s() == 60.0
    assert asked.touched(20.0, rounds=False).due_s() == 20.0
    assert asked.touched(20.0, rounds=True).due_s() == 60.0
    assert asked.touched(20.0, rounds=True, urgent=True).due_s() == 20.0
    never = msgspec.structs.replace(asked, wake_s=math.inf)
    assert never.touched(20.0, rounds=True).due_s() == 20.0


def test_gaps_and_slots() -> None:
    asked = Agenda().answered(10.0, 10.0, 0.0, 11.0, gap_s=5.0)
    assert asked.due_s() == 15.0
    assert asked.due_s(slot_s=20.0) == 20.0
    assert msgspec.structs.replace(asked, wake_s=math.inf).due_s(slot_s=20.0) == math.inf
