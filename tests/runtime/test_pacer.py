"""A process keeps to its share, whatever its steps cost."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.pacer import Pacer


class Time:
    """A clock that goes on when somebody works, waits for others or rests."""

    def __init__(self) -> None:
        self.now_s = self.used_s = self.rested_s = 0.0

    def work(self, seconds: float, waits: float = 0.0) -> None:
        self.now_s += seconds + waits
        self.used_s += seconds

    def rest(self, seconds: float) -> None:
        self.now_s += seconds
        self.rested_s += seconds


def pacer(share: float, time: Time) -> Pacer:
    return Pacer(share, lambda: time.now_s, lambda: time.used_s, time.rest)


@given(st.floats(0.05, 0.95), st.lists(st.tuples(st.floats(0.001, 0.2), st.floats(0, 0.5)), min_size=1, max_size=60))
def test_it_never_uses_more_than_its_share_and_a_second_saved(share: float, steps: list[tuple[float, float]]) -> None:
    time = Time()
    paced = pacer(share, time)
    for work_s, wait_s in steps:
        time.work(work_s, wait_s)
        paced.pause()
        assert time.used_s <= share * (time.now_s + 1.0) + 1e-9


def test_who_waits_for_others_anyway_does_not_rest() -> None:
    time = Time()
    paced = pacer(0.5, time)
    for _ in range(100):
        time.work(0.01, waits=0.02)
        paced.pause()
    assert time.rested_s == 0


def test_without_a_limit_nobody_rests() -> None:
    time = Time()
    paced = pacer(0.0, time)
    time.work(5.0)
    paced.pause()
    assert time.rested_s == 0


@pytest.mark.parametrize("given", ["", "nonsense", "-1"])
def test_a_variable_that_says_nothing_limits_nothing(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stretto.runtime import pacer as module

    monkeypatch.setenv(module.VARIABLE, given)
    module.from_environment().pause()


def test_a_real_process_rests() -> None:
    """Half a second of work at a quarter of a core takes two seconds at least, less the second that is saved."""
    script = (
        "import time; from stretto.runtime.pacer import Pacer; p = Pacer(0.25); began = time.monotonic()\n"
        "while time.process_time() < 0.5:\n"
        "    sum(range(20000)); p.pause()\n"
        "print(time.monotonic() - began)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout) > 0.5
