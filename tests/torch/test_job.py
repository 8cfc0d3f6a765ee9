"""Jobs on real processes: resized, hurt, and misused. Whatever happens, each sample counts once and weights agree."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

CASE: dict[str, Any] = {**chaos.CASE, "epochs": 12, "pause_s": 0.012}
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos.reference(tmp_path_factory.mktemp("alone"), CASE)


def start(folder: Path, warm: ForkServer, count: int, script: str = "elastic.py", **case: Any) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPTS / script)],
        workers=count,
        min_workers=count,
        environment={"CASE": json.dumps(CASE | case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    )


def finish(harness: Harness, expected: dict[str, Any], case: dict[str, Any] = CASE) -> None:
    assert harness.wait_over()["event"] == "done", harness.describe()
    chaos.check(harness, case, expected)


def test_grow_and_shrink(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """Nobody is disturbed: no unplanned generation, and the leaver ends well from inside the loop."""
    with start(tmp_path, warm, 2) as harness:
        harness.wait_members(2)
        harness.want(3)
        harness.wait_members(3)
        harness.want(1)
        harness.wait_members(1)
        finish(harness, expected)
        announced = [event for event in harness.events if event["event"] == "announced"]
        assert [event["planned"] for event in announced[1:]] == [True] * (len(announced) - 1)
        assert [worker.status for worker in harness.workers] == [0, 0, 0]
        assert len(list(tmp_path.glob("w*.result"))) == 1, "a leaver does not run the end of the script"


def test_members_that_all_go_hand_the_state_on(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """Migration: two others take over from the two that leave."""
    with start(tmp_path, warm, 2) as harness:
        harness.wait_members(2)
        harness.launch(2)
        harness.tell({"want": 2, "leave": ["w0", "w1"]})
        harness.wait(lambda: set(harness.members()) == {"w2", "w3"} or harness.over, "the others have taken over")
        finish(harness, expected)
        assert {path.name for path in tmp_path.glob("w*.result")} == {"w2.result", "w3.result"}


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_of_three_is_killed(tmp_path: Path, warm: ForkServer, expected: dict[str, Any], rank: int) -> None:
    with start(tmp_path, warm, 3) as harness:
        harness.wait_members(3)
        harness.worker(harness.members()[rank]).kill()
        harness.wait_members(2)
        finish(harness, expected)


def test_all_are_killed(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """Others go on from the last checkpoint, or from the start."""
    job = start(tmp_path, warm, 2)
    job.environment["STRETTO_CHECKPOINT_S"] = "0.2"
    with job as harness:
        harness.wait(lambda: bool(list(tmp_path.glob("checkpoints/step-*"))), "a checkpoint")
        for worker in harness.workers:
            worker.kill()
        harness.launch(2)
        harness.wait(lambda: set(harness.members()) == {"w2", "w3"} or harness.over, "the others are there")
        start_at = harness.last("formed")
        finish(harness, expected)
        assert start_at is not None
        assert start_at["applied"] > 0, "it went on from the checkpoint"


def test_a_frozen_worker_is_out_for_good(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    with start(tmp_path, warm, 3) as harness:
        harness.wait_members(3)
        frozen = harness.worker(harness.members()[1])
        frozen.freeze()
        harness.wait_members(2)
        frozen.thaw()
        finish(harness, expected)
        assert frozen.status == 75
        assert "out of its job" in frozen.text()
        assert not (tmp_path / f"{frozen.name}.result").exists()


def test_the_coordinator_is_killed(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """Training goes on without it; the new one adopts the job as it is."""
    with start(tmp_path, warm, 2, epochs=20) as harness:
        harness.wait_members(2)
        harness.kill_coordinator()
        harness.start_coordinator()
        harness.want(3)
        harness.wait_members(3)
        assert harness.wait_over()["event"] == "done"
        assert [worker.status for worker in harness.workers] == [0, 0, 0]


@pytest.mark.parametrize(
    "case", [{"loops": 3, "epochs": 3}, {"workers": 1, "epochs": 3}, {"per_worker": 2, "epochs": 3}]
)
def test_other_loops(tmp_path: Path, warm: ForkServer, case: dict[str, Any]) -> None:
    """Several loops, readers in processes of their own, many micro-batches; a newcomer in the middle."""
    whole = CASE | case
    right = chaos.reference(tmp_path / "alone", whole)
    with start(tmp_path / "job", warm, 2, **case) as harness:
        harness.wait_members(2)
        harness.want(3)
        finish(harness, right, whole)


def test_what_real_scripts_have(tmp_path: Path, warm: ForkServer) -> None:
    """Two optimizers with two backward passes, groups, tied, frozen and unused parameters, a scaler, extra state."""
    case = {**CASE, "epochs": 8, "seed": 2}
    right = chaos.reference(tmp_path / "alone", case, SCRIPTS / "features.py")
    with start(tmp_path / "job", warm, 3, "features.py", **case) as harness:
        harness.wait_members(3)
        harness.worker(harness.members()[1]).kill()
        harness.wait_members(2)
        harness.want(3)
        finish(harness, right, case)


@pytest.mark.parametrize(
    ("mode", "body", "seed"),
    [
        ("default", "plain", 1002),
        ("default", "plain", 1308),
        ("bitwise", "plain", 1133),
        ("bitwise", "plain", 1308),
        ("default", "collectives", 21),
        ("bitwise", "collectives", 0),
        ("default", "steps", 19),
        ("default", "syncnorm", 5),
    ],
)
def test_random_schedules(tmp_path: Path, warm: ForkServer, mode: str, body: str, seed: int) -> None:
    """A few schedules of the kind that the benchmark runs by the hundred: the leader and the coordinator are killed in
    a switch, all are killed while state travels, others frozen."""
    case = chaos.of_mode(mode, body)
    right = chaos.reference(tmp_path / "alone", case, warm=warm)
    chaos.trial(seed, tmp_path / "job", case, right, warm)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_bits_do_not_depend_on_the_number_of_workers(tmp_path: Path, warm: ForkServer, workers: int) -> None:
    """BatchNorm and dropout included."""
    case = {**chaos.BITWISE, "epochs": 4, "pause_s": 0.0}
    right = chaos.reference(tmp_path / "alone", case)
    with start(tmp_path / "job", warm, workers, **case) as harness:
        finish(harness, right, case)


MISUSES = {
    "raise": "ValueError: the script is wrong",
    "nan": "the loss is not a number",
    "break": "job.stop()",
    "dataset": "the workers of the job differ in loop 0: here it has",
    "model": "model",
    "skip": "without a backward pass",
    "second loop": "the workers of the job differ in loop 1: here it has",
    "short": "the dataset has 7 samples, a global batch 12",
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_ends_with_one_clear_error(tmp_path: Path, warm: ForkServer, misuse: str) -> None:
    with start(tmp_path, warm, 2, "misuse.py", misuse=misuse) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert MISUSES[misuse] in end["reason"]
        assert all(worker.status for worker in harness.workers)


def test_a_stranger_and_a_double_are_refused(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    with start(tmp_path, warm, 2) as harness:
        harness.wait_members(2)
        double = harness._launch("w0")
        right, harness.token = harness.token, "wrong"
        stranger = harness._launch("stranger")
        harness.token = right
        harness.wait(lambda: not double.running and not stranger.running, "both have ended")
        assert double.status
        assert stranger.status
        assert "does not take this worker" in double.text()
        assert "does not take this worker" in stranger.text()
        harness.workers.remove(double)
        finish(harness, expected)


def test_nobody_answers(tmp_path: Path, warm: ForkServer) -> None:
    harness = start(tmp_path, warm, 1)
    harness.environment["STRETTO_CONNECT_S"] = "0.5"
    harness.port = 9
    worker = harness._launch("alone")
    began_s = time.monotonic()
    harness.wait(lambda: not worker.running, "it gives up")
    assert time.monotonic() - began_s >= 0.5
    assert "no coordinator answers" in worker.text()
    worker.close()


def test_all_are_terminated(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """They leave one after the other; the last one writes a checkpoint, from which others go on."""
    with start(tmp_path, warm, 2) as harness:
        harness.wait_members(2)
        harness.wait_applied(10)
        for worker in harness.workers:
            worker.process.signal(signal.SIGTERM)
        harness.wait(lambda: not any(worker.running for worker in harness.workers), "both have gone")
        assert [worker.status for worker in harness.workers] == [0, 0]
        assert not harness.over
        harness.launch(2)
        harness.wait(lambda: set(harness.members()) == {"w2", "w3"} or harness.over, "others have taken over")
        formed = harness.last("formed")
        assert formed is not None
        assert formed["applied"] >= 10, "nothing was lost"
        finish(harness, expected)
