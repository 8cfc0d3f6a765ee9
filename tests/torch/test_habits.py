"""The examples of the guide: each runs by hand and on two workers, and says the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.testing import Harness

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "habits").glob("*.py"))
TOLD = {
    "accumulation": "16 steps, weights of length",
    "best": "epoch 7: loss",
    "contrastive": "over 128 pairs",
    "curriculum": "60 steps, weights of length",
    "early_stopping": "epochs, the best loss is",
    "evaluation": "epoch 3: accuracy 0.8",
    "exchange": "epoch 5: loss 0.",
    "fine_tuning": "60 steps, 2 groups, accuracy 0.8",
    "gan": "80 steps, the middle of what it makes is at",
    "policy_gradient": "40 steps, 0.",
    "randomness": "90 steps, accuracy 0.9",
    "several_loops": "35 steps, weights of length",
    "tensorboard_curve": "",
    "trainer": "step 40: 1",
}
WRITTEN = {"best": ["best.safetensors", "model.pt"], "tensorboard_curve": ["runs/digits"]}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    preload = ("torch", "stretto.torch", "torch.utils.tensorboard", "sklearn.datasets")
    with ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=preload) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_by_hand_and_on_two_workers(tmp_path: Path, warm: ForkServer, example: Path) -> None:
    hand, job = tmp_path / "hand", tmp_path / "job"
    for folder in (hand, job):
        folder.mkdir()
    command, log = [sys.executable, str(example)], tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with launch(command, env=environment, cwd=hand, log=log, warm=warm) as process:
        assert process.wait(120.0) == 0, log.read_text()
    with Harness(
        tmp_path / "folder", command, workers=2, min_workers=2, options=chaos.OPTIONS, warm=warm, cwd=job
    ) as harness:
        assert harness.wait_over(120.0)["event"] == "done", harness.describe()
        told = "".join(worker.text() for worker in harness.workers)
    assert TOLD[example.stem] in told
    assert told == log.read_text(), "by hand it says something else"
    for name in WRITTEN.get(example.stem, []):
        assert (hand / name).exists()
        assert (job / name).exists()
