"""Real workers that are busy for longer than a generation may take to form: nobody goes on without them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "hanging.py"
OPTIONS = {**chaos.OPTIONS, "heartbeat_s": 0.1, "formation_s": 0.3}
LONG = 30
"""Heartbeats: ten times as long as a generation may take."""


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, workers: int, **case: Any) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=workers,
        min_workers=workers,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=OPTIONS,
        warm=warm,
    )


def beats(harness: Harness, worker: str) -> list[dict[str, Any]]:
    with harness.changed:
        told = [event for event in harness.events if event["event"] == "progress" and event["worker"] == worker]
    return [event["heartbeat"] for event in told]


def wait_long(harness: Harness, worker: str) -> None:
    before = len(beats(harness, worker))
    harness.wait(lambda: len(beats(harness, worker)) > before + LONG, f"many heartbeats of {worker}")


def arrives(harness: Harness, worker: str, loop: int, step: int) -> bool:
    said = beats(harness, worker)
    return bool(said) and (said[-1]["loop"], said[-1]["step"]) >= (loop, step)


def goes_on_with(harness: Harness, *workers: str) -> None:
    """What held the busy one up is over: it is in, and the job ends well with nobody put out but who died."""
    (harness.folder / "go").touch()
    assert harness.wait_over()["event"] == "done", harness.describe()
    assert [harness.worker(name).status for name in workers] == [0] * len(workers), harness.describe()
    assert set(workers) <= set(harness.members()), harness.describe()


@pytest.mark.parametrize(("place", "loop", "step"), [("body", 0, 6), ("between", 1, 0)])
def test_a_survivor_that_is_busy_is_waited_for(
    tmp_path: Path, warm: ForkServer, place: str, loop: int, step: int
) -> None:
    with start(tmp_path, warm, 3, place=place, loops=2) as harness:
        harness.wait(lambda: arrives(harness, "w0", loop, step) and arrives(harness, "w2", loop, step), "both wait")
        harness.worker("w2").kill()
        harness.wait(lambda: harness.count("announced") == 2, "a generation without it")
        wait_long(harness, "w1")
        goes_on_with(harness, "w0", "w1")
        assert harness.count("announced") == 2, harness.describe()


def test_who_breaks_out_of_its_loop_later_than_the_others_is_waited_for(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, place="body", breaks=True, loops=2) as harness:
        harness.wait(lambda: arrives(harness, "w0", 0, 6) and arrives(harness, "w1", 0, 6), "both are there")
        wait_long(harness, "w1")
        goes_on_with(harness, "w0", "w1")
