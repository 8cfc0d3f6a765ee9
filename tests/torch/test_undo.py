"""A batch on which one optimizer steps several times, lost when some of them are done: all are taken back, or the job
ends with an error that says why it cannot be."""

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

SCRIPT = Path(__file__).parent / "scripts" / "repeating.py"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, case: dict[str, Any]) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=3,
        min_workers=3,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    )


@pytest.mark.parametrize(
    ("first", "step", "update"),
    [(0, 0, 2), (0, 5, 2), (0, 5, 3), (4, 5, 2)],
    ids=["the first batch", "the second sum", "the third sum", "a later habit"],
)
def test_all_steps_are_taken_back(tmp_path: Path, warm: ForkServer, first: int, step: int, update: int) -> None:
    case = {"from": first, "dies": [step, update]}
    right = chaos.reference(tmp_path / "alone", case, SCRIPT, warm)
    with start(tmp_path / "job", warm, case) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert (tmp_path / "job" / "died").exists()
        chaos.check_weights(tmp_path / "job", case, right)


@pytest.mark.parametrize("update", [2, 3])
def test_not_where_nobody_could_know(tmp_path: Path, warm: ForkServer, update: int) -> None:
    """The first batch with several steps, which is not that of the script: nothing was copied when it began."""
    with start(tmp_path, warm, {"from": 5, "dies": [5, update]}) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "a backward pass followed a step(), or an exchange did, for the first time" in end["reason"]
