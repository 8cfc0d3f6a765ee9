"""The checks that every schedule of faults ends with can fail: one sample too few or too many is found and named.

Spoilt is one step in the middle, on one of two workers. Where the cut of the slice itself is wrong both checks see it:
the ledger of what was fed, and the weights. Where the ledger is told the truth and the tensors are changed behind its
back only the weights can tell.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.runtime.ledger import AuditError
from stretto.runtime.order import Loop, indices, slices, virtual_slices
from stretto.testing import Harness

CASES: dict[str, dict[str, Any]] = {
    "default": {**chaos.CASE, "epochs": 4, "pause_s": 0.0},
    "bitwise": {**chaos.BITWISE, "epochs": 4, "pause_s": 0.0},
}
SPOILT = 20
"""The step in the middle."""
WORKERS = 2
FAULTS = {"drop": "missing", "double": "doubled"}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.fixture(scope="module", params=["default", "bitwise"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, warm: ForkServer, mode: str) -> dict[str, Any]:
    return chaos.reference(tmp_path_factory.mktemp("alone"), CASES[mode], warm=warm)


def trained(folder: Path, warm: ForkServer, case: dict[str, Any], mutate: str) -> Harness:
    environment = {"CASE": json.dumps({**case, "mutate": mutate}), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(chaos.SCRIPT)]
    with Harness(
        folder, command, workers=WORKERS, min_workers=WORKERS, environment=environment, options=chaos.OPTIONS, warm=warm
    ) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
    return harness


def last_sample_of_the_first(mode: str) -> int:
    """The last of the slice of rank 0 in that step, by the order alone."""
    case = CASES[mode]
    batch = indices(Loop(samples=case["samples"], size=case["size"], epochs=case["epochs"]), SPOILT)
    cuts = virtual_slices(len(batch), 8)[: 8 // WORKERS] if mode == "bitwise" else slices(len(batch), WORKERS)[:1]
    return int(batch[cuts[-1][1] - 1])


def test_what_is_right_passes(tmp_path: Path, warm: ForkServer, mode: str, expected: dict[str, Any]) -> None:
    chaos.check(trained(tmp_path, warm, CASES[mode], ""), CASES[mode], expected)


@pytest.mark.parametrize("mutate", FAULTS)
def test_a_wrong_slice_is_seen_in_the_ledger_and_in_the_weights(
    tmp_path: Path, warm: ForkServer, mode: str, expected: dict[str, Any], mutate: str
) -> None:
    harness = trained(tmp_path, warm, CASES[mode], mutate)
    sample = last_sample_of_the_first(mode)
    with pytest.raises(AuditError, match=rf"{FAULTS[mutate]}: loop 0 step {SPOILT} .*: 1 samples \({sample}\) by w"):
        chaos.check(harness, CASES[mode], expected)
    with pytest.raises(AssertionError, match=rf"the weights differ .* for the first time after step {SPOILT}$"):
        chaos.check_weights(tmp_path, CASES[mode], expected)


@pytest.mark.parametrize("mutate", ["silent drop", "silent double"])
def test_what_the_ledger_cannot_see_is_seen_in_the_weights(
    tmp_path: Path, warm: ForkServer, mode: str, expected: dict[str, Any], mutate: str
) -> None:
    harness = trained(tmp_path, warm, CASES[mode], mutate)
    chaos.check_ledger(tmp_path, CASES[mode])
    with pytest.raises(AssertionError, match=rf"the weights differ .* for the first time after step {SPOILT}$"):
        chaos.check(harness, CASES[mode], expected)


def test_a_worker_that_ends_oddly_is_seen(tmp_path: Path, warm: ForkServer) -> None:
    """Though the job was done well without it."""
    harness = trained(tmp_path, warm, CASES["default"], "")
    chaos.check_ends(harness)
    harness.command = [sys.executable, "-c", "raise SystemExit(3)"]
    harness.launch()[0].process.wait(10.0)
    with pytest.raises(AssertionError, match="w2 ended with 3"):
        chaos.check_ends(harness)
