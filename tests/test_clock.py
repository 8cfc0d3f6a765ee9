"""The server's own line of time, beside a machine's clock that is set."""

from __future__ import annotations

import pytest

from stretto.clock import Clock


class Times:
    """A machine: how long it has run, and what its clock says."""

    def __init__(self) -> None:
        self.up_s, self.set_s = 100.0, 1_700_000_000.0

    def wall(self) -> float:
        return self.set_s + self.up_s

    def steady(self) -> float:
        return self.up_s

    def clock(self, boot: str = "first") -> Clock:
        return Clock(self.wall, self.steady, boot)


@pytest.mark.parametrize("step_s", [-600.0, 3600.0, -1e9])
def test_a_step_of_the_machines_clock_is_none_of_the_line(step_s: float) -> None:
    times = Times()
    clock = times.clock()
    began_s = clock()
    assert began_s == clock.told(began_s) == clock.heard(began_s) == times.wall()
    times.set_s += step_s
    times.up_s += 7.0
    assert clock() == began_s + 7.0
    assert clock.told(clock()) == times.wall()
    assert clock.heard(times.wall()) == clock()
    assert clock.told(began_s) == began_s + step_s, "seven seconds ago, as people count"


def test_what_was_told_is_told_again() -> None:
    """Clocks that differ by moments do not make another answer of the same event."""
    times = Times()
    clock = times.clock()
    for times.set_s in (1_700_000_000.0, 1_700_000_000.1, 1_699_999_999.7):
        assert clock.told(5.0) == 5.0


def test_a_server_that_is_started_again_goes_on_with_the_line() -> None:
    times = Times()
    before = times.clock()
    then_s = before()
    times.set_s -= 600.0
    times.up_s += 10.0
    after = times.clock()
    after.resume(before.anchor(), then_s)
    assert after() == before() == then_s + 10.0
    assert after.told(after()) == times.wall()


def test_after_a_start_of_the_machine_time_never_goes_back() -> None:
    times = Times()
    before = times.clock()
    times.up_s += 50.0
    newest_s = before()
    times.up_s, times.set_s = 1.0, 0.0
    behind = times.clock("second")
    behind.resume(before.anchor(), newest_s)
    assert behind() == newest_s, "a clock that lost its battery"
    times.set_s = 1_800_000_000.0
    ahead = times.clock("third")
    ahead.resume(behind.anchor(), newest_s)
    assert ahead() == times.wall()


@pytest.mark.parametrize("kept", [None, {}, {"boot": "another", "began_s": 0.0}])
def test_without_an_anchor_the_line_begins_at_the_machines_clock(kept: object) -> None:
    times = Times()
    clock = times.clock()
    clock.resume(kept, 0.0)
    assert clock() == times.wall()
