"""Real workers that hang: named with the line they hang in, and ended where they hold up a loop."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "hanging.py"
SOON = {"STRETTO_STUCK_NAMED_S": "0.5", "STRETTO_STUCK_ENDED_S": "2"}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, given: dict[str, str] = SOON, **case: Any) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=2,
        min_workers=2,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1", **given},
        options=chaos.OPTIONS,
        warm=warm,
    )


def told(harness: Harness, worker: str) -> list[dict[str, Any]]:
    """What a worker's heartbeats have said of its standing still."""
    with harness.changed:
        beats = [event for event in harness.events if event["event"] == "progress" and event["worker"] == worker]
    return [stuck for event in beats for stuck in event["heartbeat"]["stuck"]]


def test_one_of_two_hangs_in_its_body(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, place="body") as harness:
        harness.wait(lambda: harness.last("failed") is not None, "the job has failed")
        failed = harness.last("failed")
        assert failed is not None
        assert failed["reason"].startswith("worker w1 has made no step for "), harness.describe()
        assert re.search(r"hanging\.py:\d+ stands_still", failed["reason"])
        assert "STRETTO_STUCK_ENDED_S" in failed["reason"]
        mine = told(harness, "w1")
        assert not mine[0]["overdue"], "named first, ended later"
        assert not mine[0]["waits"]
        assert any("stands_still" in frame for frame in mine[0]["stack"])
        assert all(stuck["waits"] for stuck in told(harness, "w0"))


def test_who_hangs_after_its_training_is_named_and_not_ended(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, place="after") as harness:
        harness.wait(lambda: any(stuck["seconds"] > 3 for stuck in told(harness, "w1")), "it has stood for long")
        assert {stuck["place"] for stuck in told(harness, "w1")} == {"after"}
        assert not any(stuck["overdue"] for stuck in told(harness, "w1"))
        (tmp_path / "go").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()


def test_a_slow_job_that_moves_is_left_alone(tmp_path: Path, warm: ForkServer) -> None:
    """Its steps take longer than the seconds that are set: ten of them do not."""
    given = {"STRETTO_STUCK_NAMED_S": "0.1", "STRETTO_STUCK_ENDED_S": "0.2"}
    with start(tmp_path, warm, given, pause_s=0.3) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert not any(stuck["overdue"] for worker in ("w0", "w1") for stuck in told(harness, worker))


def test_a_wrong_limit_is_refused_when_it_joins(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, {"STRETTO_STUCK_ENDED_S": "soon"}) as harness:
        harness.wait(lambda: not any(worker.running for worker in harness.workers), "both have ended")
        assert "STRETTO_STUCK_ENDED_S is 'soon', which is no number of seconds" in harness.workers[0].text()
