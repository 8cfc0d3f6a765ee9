"""Loops as people write them: the result is that of plain PyTorch over the same batches, or one clear error.

Every habit runs by hand, and as a job that grows, loses a worker inside its body and another one inside a sum, grows
again and shrinks; both are compared with a training that knows nothing of Stretto.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mistakes
import pytest
import torch
from torch import Tensor

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

HERE = Path(__file__).parent
RUN = [sys.executable, str(HERE / "run.py")]
OPTIONS = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 5.0, "formation_s": 10.0}
HABITS = sorted(path.stem for path in (HERE / "habits").glob("[a-z]*.py"))
TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch")) as server:
        server.wait_ready()
        yield server


def started(folder: Path, warm: ForkServer, name: str, workers: int, **environment: str) -> Harness:
    folder.mkdir()
    return Harness(
        folder / "job", [*RUN, name, str(folder)], workers=workers, min_workers=workers,
        environment={"OMP_NUM_THREADS": "1", **environment}, options=OPTIONS, warm=warm,
    )  # fmt: skip


def by_hand(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run([*RUN, name, str(folder)], capture_output=True, text=True, timeout=120, check=False)


def struck(harness: Harness, folder: Path, sign: str) -> None:
    """The worker of rank 1 dies there; another one comes in its place."""
    before, count = set(harness.members()), len(harness.members())
    (folder / sign).touch()
    harness.wait(lambda: not (folder / sign).exists() or harness.over, f"a death in the {sign}")
    harness.wait(lambda: set(harness.members()) < before or harness.over, "the others have noticed")
    assert not harness.over, harness.describe()
    harness.want(count)
    harness.wait_members(count)


def far(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """What differs, by norm."""
    assert found.keys() == right.keys()
    off = {
        name: float((found[name] - right[name]).double().norm() / (right[name].double().norm() + 1e-30))
        for name in right
    }
    return {name: much for name, much in off.items() if not much <= TOLERANCE}


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_has_the_result_of_plain_pytorch(tmp_path: Path, warm: ForkServer, name: str) -> None:
    right = importlib.import_module(f"habits.{name}").plain()
    hand = by_hand(tmp_path / "hand", name)
    assert hand.returncode == 0, hand.stderr
    assert not far(torch.load(tmp_path / "hand" / "alone.pt"), right), "by hand"
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 1) as harness:
        harness.wait_applied(2)
        harness.want(3)
        harness.wait_members(3)
        struck(harness, folder, "body")
        struck(harness, folder, "sum")
        harness.want(2)
        harness.wait_members(2)
        assert harness.applied() < 60, "the faults came too late"
        (folder / "hurry").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()
    results = sorted(folder.glob("w*.pt"))
    assert len(results) == 2, "those who were members at the end write the result"
    for path in results:
        assert not far(torch.load(path), right), path.stem


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.REFUSED])
def test_a_mistake_is_refused_by_hand_and_elastic(tmp_path: Path, warm: ForkServer, name: str) -> None:
    error = mistakes.REFUSED[mistakes.ALL[name]]
    hand = by_hand(tmp_path / "hand", name)
    assert hand.returncode == 1
    assert error in hand.stderr
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 2) as harness:
        (folder / "hurry").touch()
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert error in end["reason"]


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.PARTED])
def test_replicas_that_part_are_found_without_any_other_check(tmp_path: Path, warm: ForkServer, name: str) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 2, CHECKS_OFF="1") as harness:
        (folder / "hurry").touch()
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert mistakes.PARTED[mistakes.ALL[name]] in end["reason"]


def test_nobody_trains_on_after_another_has_ended(tmp_path: Path, warm: ForkServer) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, "the_leader_leaves", 2) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "ended after 3 loops, that of" in end["reason"]
