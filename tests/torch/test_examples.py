"""The examples run as a newcomer would run them, and under a job of two workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import chaos
import pytest

from stretto.testing import Harness

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("digits_mlp.py", ("--epochs", "10"), "120 steps, 1 workers at the end"),
        ("digits_cnn.py", ("--rounds", "1", "--readers", "1"), "round 0: 36 steps"),
        ("paced.py", ("--epochs", "2", "--sample-ms", "0.1"), "24 steps, 1 workers at the end"),
        ("resnet20_cifar.py", ("--steps", "4"), "4 steps, last loss"),
    ],
)
def test_alone(name: str, options: tuple[str, ...], told: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


def test_one_of_several_without_a_coordinator_says_so() -> None:
    """As under torchrun, or as a rigid job of two workers: each would train everything by itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": "0"}
    command = [sys.executable, str(EXAMPLES / "digits_mlp.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "one of 2 processes" in done.stderr
    assert "--workers 1..N" in done.stderr


def test_digits_on_two_workers(tmp_path: Path) -> None:
    """The test accuracy of a model that learned something."""
    command = [sys.executable, str(EXAMPLES / "digits_mlp.py"), "--epochs", "20"]
    with Harness(tmp_path, command, workers=2, min_workers=2, options=chaos.OPTIONS) as harness:
        assert harness.wait_over(240.0)["event"] == "done", harness.describe()
        told = "".join(worker.text() for worker in harness.workers)
        assert "240 steps, 2 workers at the end" in told
        assert float(told.split("accuracy ")[1]) > 0.85
