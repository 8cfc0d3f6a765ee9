"""How many steps are taken to come."""

from __future__ import annotations

from stretto.runtime.outlook import Outlook


def test_loops_without_epochs_are_taken_to_be_the_last() -> None:
    outlook = Outlook()
    assert [outlook.after(0, 10), outlook.after(1, 4)] == [0, 0]


def test_an_epoch_is_taken_to_have_the_loops_of_the_one_before() -> None:
    outlook = Outlook()
    outlook.epoch(3, left=2)
    assert outlook.after(3, 10) == 2 * 10
    assert outlook.after(4, 4) == 2 * (10 + 4)
    outlook.epoch(5, left=1)
    assert outlook.after(5, 10) == 4 + (10 + 4)
    assert outlook.after(6, 4) == 10 + 4
    outlook.epoch(7, left=0)
    assert outlook.after(7, 12) == 4
    assert outlook.after(8, 4) == 0
    outlook.over()
    assert outlook.after(9, 10) == 0


def test_what_is_drawn_on_the_way_counts() -> None:
    outlook = Outlook()
    outlook.epoch(0, left=1)
    assert [outlook.after(0, 6), outlook.after(0, 7)] == [6, 7]


def test_a_worker_that_begins_in_the_middle_of_an_epoch_knows_what_it_has_seen() -> None:
    outlook = Outlook()
    outlook.epoch(4, left=1)
    assert outlook.after(5, 4) == 4
    outlook.epoch(6, left=0)
    assert outlook.after(6, 10) == 4
