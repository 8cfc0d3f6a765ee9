"""One curve in TensorBoard, whatever happens to the job that draws it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chaos
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "habits" / "tensorboard_curve.py"
SCRIPT = Path(__file__).parent / "scripts" / "curve.py"
EVERY, STEPS = 5, 75
WRITTEN = list(range(EVERY - 1, STEPS, EVERY))


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    preload = ("torch", "stretto.torch", "torch.utils.tensorboard", "sklearn.datasets")
    with ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=preload) as server:
        server.wait_ready()
        yield server


def curve(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows: each step once, in order."""
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    points = found.Scalars(name)
    assert [point.step for point in points] == sorted({point.step for point in points}), "a step twice"
    return {point.step: point.value for point in points}


def written(folder: Path) -> list[list[int]]:
    """The steps of each writer, in the order in which they began."""
    return [
        [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
        for path in sorted(folder.iterdir())
    ]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    """The curves of a run by hand."""
    folder = tmp_path_factory.mktemp("hand")
    hand = subprocess.run(
        [sys.executable, str(EXAMPLE), "--folder", str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert hand.returncode == 0, hand.stderr
    return {name: curve(folder, name) for name in ("loss/test", "loss/train")}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_one_curve_through_resizes_a_dead_leader_and_a_restore(
    tmp_path: Path, warm: ForkServer, right: dict[str, dict[int, float]], moment: str
) -> None:
    """The leader dies just before it writes of a step that all have applied, or when it has."""
    assert [list(points) for points in right.values()] == [WRITTEN] * 2

    job, runs = tmp_path / "job", tmp_path / "elastic"
    checkpoints = {"STRETTO_CHECKPOINT_S": "0.1", "STRETTO_CHECKPOINT_KEEP": "1000"}
    command = [sys.executable, str(SCRIPT), str(EXAMPLE), "--folder", str(runs)]
    harness = Harness(job, command, workers=1, environment=checkpoints, options=chaos.OPTIONS, warm=warm)
    with harness:
        harness.wait_applied(7)
        harness.want(3)
        harness.wait_members(3)
        first, second, _ = harness.members()
        (job / f"{moment}-{first}").touch()
        harness.wait(lambda: harness.worker(first).status == -signal.SIGKILL or harness.over, "the leader is dead")
        harness.wait(lambda: len(harness.members()) == 2 or harness.over, "the others go on")
        assert harness.members()[0] == second
        harness.wait(lambda: len(list(runs.iterdir())) == 2 or harness.over, "the next leader writes")
        harness.wait_applied(harness.applied() + 2 * EVERY)
        assert not harness.over, harness.describe()
        for worker in harness.workers:
            worker.kill()
        harness.wait(lambda: not any(worker.running for worker in harness.workers), "all are dead")
        so_far = list(curve(runs, "loss/test"))
        assert so_far == WRITTEN[: len(so_far)], "before the restore"
        kept = sorted((job / "checkpoints").glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        for later in kept[1:]:
            shutil.rmtree(later)
        harness.launch(2)
        (job / "hurry").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()

    writers = written(runs)
    assert len(writers) == 3, "each leader opens one"
    assert set(writers[0]) < set(WRITTEN)
    assert all(len(steps) == 2 * len(set(steps)) for steps in writers), "two curves, each step of them once"
    again = {"before": EVERY, "after": 0}[moment]
    assert writers[1][0] == max(writers[0]) + again, "what the dead leader may not have written its successor does"
    assert writers[2][0] <= max(writers[1]), "the restore repeats some"
    for name, points in right.items():
        assert curve(runs, name) == pytest.approx(points, rel=1e-4)
