"""Schedules of faults are values of their seed, and reach every kind of fault at every kind of moment."""

from __future__ import annotations

import itertools
import subprocess
import sys

from stretto.testing.faults import KINDS, MOMENTS, schedule

SEEDS = range(200)


def test_a_seed_says_everything() -> None:
    """In another process, too, whose hashes differ."""
    told = [
        sys.executable,
        "-c",
        "from stretto.testing.faults import schedule\nfor seed in range(20): print(schedule(seed))",
    ]
    other = subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout
    assert other.splitlines() == [str(schedule(seed)) for seed in range(20)]
    assert len({schedule(seed)._replace(seed=0) for seed in SEEDS}) == len(SEEDS)


def test_every_fault_comes_at_every_moment() -> None:
    struck = {
        (strike.when, fault.kind)
        for seed in range(2000)
        for strike in schedule(seed).strikes
        for fault in strike.faults
    }
    assert struck == set(itertools.product([*MOMENTS, "end"], KINDS))


def test_two_hundred_schedules_have_what_the_promise_is_about() -> None:
    strikes = [strike for seed in SEEDS for strike in schedule(seed).strikes]
    assert {strike.when for strike in strikes} == {*MOMENTS, "end"}
    assert {fault.kind for strike in strikes for fault in strike.faults} == set(KINDS)
    assert any(len(strike.faults) > 1 for strike in strikes)
    assert all(strike.when != "end" for seed in SEEDS for strike in schedule(seed).strikes[:-1])
