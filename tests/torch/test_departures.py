"""A script that ends inside its loop by SystemExit is told from one that left the loop and ends afterwards."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "leaving.py"


def _ways(name: str) -> list[str]:
    """Of the script, which is not imported: it joins."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.unparse(node.value).strip("()").split(", ")
    raise LookupError(name)


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def by_hand(folder: Path, warm: ForkServer, case: str) -> tuple[int | None, str]:
    environment = {**os.environ, "CASE": case, "OMP_NUM_THREADS": "1"}
    log = folder / "log.txt"
    with launch([sys.executable, str(SCRIPT)], env=environment, log=log, warm=warm) as process:
        return process.wait(120.0), log.read_text()


@pytest.mark.parametrize("case", [*_ways("ENDS"), "in_the_script"])
def test_an_end_inside_a_loop_is_an_error(tmp_path: Path, warm: ForkServer, case: str) -> None:
    # A batch that nobody has left does not count yet.
    step = {"in_front": 1, "left_alone": 7, "in_the_script": 7}.get(case, 8)
    status, said = by_hand(tmp_path, warm, case)
    assert status == 1, said
    assert f"the script ended inside its loop, at step {step} of 20" in said


@pytest.mark.parametrize("case", _ways("GOES_ON"))
def test_a_script_may_end_in_any_way_after_its_loop(tmp_path: Path, warm: ForkServer, case: str) -> None:
    assert by_hand(tmp_path, warm, case) == (0, "")


@pytest.mark.parametrize("case", ["raised", "caught"])
def test_without_a_fork_server_too(case: str) -> None:
    environment = {**os.environ, "CASE": case, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == (case == "raised"), ended.stderr


@pytest.mark.parametrize("case", ["raised", "imported", "one_by_one", "returned", "caught"])
def test_workers_of_a_job(tmp_path: Path, warm: ForkServer, case: str) -> None:
    with Harness(
        tmp_path, [sys.executable, str(SCRIPT)], workers=2, min_workers=2,
        environment={"CASE": case, "OMP_NUM_THREADS": "1"}, options=chaos.OPTIONS, warm=warm,
    ) as harness:  # fmt: skip
        end = harness.wait_over()
        if case in _ways("GOES_ON"):
            assert end["event"] == "done", harness.describe()
        else:
            assert end["event"] == "failed", harness.describe()
            assert "the script ended inside its loop" in end["reason"]
