"""Declared accumulation and weighed losses: the gradient of whole batches written out by hand, at any size."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "weighed.py"
BASE: dict[str, Any] = {"samples": 110, "size": 12, "epochs": 6, "pause_s": 0.003}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 3},
    "accumulated in small passes": {"accumulate": 3, "per_worker": 3},
    "weighed": {"weighed": True},
    "weighed in small passes": {"weighed": True, "per_worker": 1},
    "both": {"weighed": True, "accumulate": 2, "per_worker": 4},
}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, count: int, case: dict[str, Any]) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=count,
        min_workers=count,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    )


@pytest.mark.parametrize("name", CASES)
def test_as_written_out_by_hand(tmp_path: Path, warm: ForkServer, name: str) -> None:
    """Three workers, of which one is killed and replaced in the middle; and one worker alone."""
    case = {**BASE, **CASES[name]}
    right = chaos.reference(tmp_path / "hand", {**case, "plain": True}, SCRIPT)
    alone = chaos.reference(tmp_path / "alone", {**case, "pause_s": 0.0}, SCRIPT)
    np.testing.assert_allclose(alone["weights"], right["weights"], rtol=1e-9)
    with start(tmp_path / "job", warm, 3, case) as harness:
        harness.wait_members(3)
        harness.worker(harness.members()[1]).kill()
        harness.wait_members(2)
        harness.want(3)
        assert harness.wait_over()["event"] == "done", harness.describe()
        audited = {**case, "size": case["size"] * case.get("accumulate", 1)}
        chaos.check(harness, audited, right)


def test_an_accumulated_step_that_is_never_applied(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, {**BASE, "accumulate": 3, "no step": True}) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "call step() in every pass" in end["reason"]
