"""What is written down now and then is written down also when nothing happens any more."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from machine import play
from played_machine import played

from stretto import plugins
from stretto.core import codec
from stretto.core.cycle import CycleState
from stretto.core.estimate.curve import Window
from stretto.core.reservations import Wait
from stretto.server import loop, memory
from stretto.server.estimates import Estimates
from stretto.server.memory import MemoryKeeper, SpeedKeeper

SOON_S = 1.0


class Time:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_who_comes_too_soon_is_told_when_to_come_again() -> None:
    clock, kept, policy = Time(), list[dict[str, Any]](), plugins.find("fifo", {})
    keeper = MemoryKeeper(kept.append, clock)
    first, second = CycleState(blocked={1: Wait(1.0)}), CycleState(blocked={2: Wait(1.0)})
    clock.now_s += 100.0
    assert keeper.keep(policy, first) == math.inf
    clock.now_s += 5.0
    assert keeper.keep(policy, first) == math.inf, "nothing has changed"
    due_s = keeper.keep(policy, second)
    assert clock.now_s < due_s < math.inf
    assert len(kept) == 1
    clock.now_s = due_s
    assert keeper.keep(policy, second) == math.inf, "on the dot"
    assert keeper.recalled(kept[-1], policy) == second


def test_so_is_who_brings_speeds() -> None:
    clock, kept, estimates = Time(), list[dict[str, Any]](), Estimates()
    keeper = SpeedKeeper(kept.append, estimates, clock)
    estimates.observe(1, "cpu", Window(1, 8, 0.1, 0.0, 0.0, 0.8))
    due_s = keeper.keep()
    assert clock.now_s < due_s < math.inf
    clock.now_s = due_s
    assert keeper.keep() == math.inf
    assert list(kept[-1]) == ["1"]


def test_the_last_decision_before_a_quiet_hour_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after the last write, and nobody asks for another decision."""
    monkeypatch.setattr(memory, "_EVERY_S", SOON_S)

    async def story() -> None:
        async with played(tmp_path, 2, policy="elasticflow") as m:
            await m.begun("one", workers=1, expect="5000s", deadline="9000s")
            await m.after(2 * SOON_S)
            before = m.plane.loop.state
            await m.begun("two", workers=1, expect="5000s", deadline="9000s")
            assert m.plane.loop.state != before
            await m.comes(lambda: kept(m.plane.store) == codec.plain(m.plane.loop.state))

    def kept(store: Any) -> Any:
        return store.load().settings.get("memory", {}).get("state")

    play(story())


def test_the_last_progress_of_a_job_that_falls_silent_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_EVERY_S", SOON_S)
    monkeypatch.setattr(loop, "_RECORD_PROGRESS_S", SOON_S)

    async def story() -> None:
        async with played(tmp_path, 1) as m:
            job = await m.begun("one", elastic={"min": 1, "max": 1})
            active, estimates = m.plane.book.jobs[job.number], m.plane.loop.estimates
            around = m.plane.loop.drivers[job.number].around  # type: ignore[attr-defined]
            for steps in (100, 200):
                active.progress.steps = steps
                estimates.observe(job.number, "cpu", Window(1, steps, 0.1, 0.0, 0.0, 0.1 * steps))
                around.progressed(job.number)
            assert active.job.steps == 100, "not at every heartbeat"
            await m.comes(lambda: active.job.steps == 200)
            await m.comes(lambda: curve(m.plane.store, job.number)["count"] == [300])

    def curve(store: Any, number: int) -> Any:
        return store.load().settings.get("measured", {}).get(str(number), {}).get("cpu", {"count": []})

    play(story())
