"""What workers exchange: alike for all, at any number of them, whoever comes and goes; and mistakes that are said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "exchanging.py"
ALONE = {
    "before": "before the first loop",
    "between attempts": "job.barrier() between two steps of job.attempt()",
    "by the leader alone": "in a function that is called after a step",
    "gathered in passes": "in a body that takes several passes",
    "trained through passes": "there is no gradient through this",
    "no such operation": "use one of sum, mean, max, min",
    "one in another": "by another exchange",
    "weighed": "while a batch is read or weighed",
    "a schedule made late": "a scheduler or a scaler",
    "too much between": "between loops at most 1 MiB",
}
"""Refused by hand, too."""
TOGETHER = {
    "skipped": "the workers of rank 1 go on without it",
    "skipped after others": "the workers of rank 1 go on without it",
    "skipped between": "the workers of rank 1 go on without it",
    "of different keys": "rank 0 is at job.all_reduce(…, 'sum') of {'one': int64 [], 'three': int64 []}; rank 1 is at",
    "after the end": " has ended, and this worker waits for it in job.all_reduce(…, 'sum')",
    "different": "rank 0 is at job.all_gather(…) of float64 rows of [6]; rank 1 is at job.barrier()",
    "of different shapes": "rank 0 is at job.all_reduce(…, 'sum') of float64 [3, 6]; rank 1 is at",
}
"""Mistakes that take two."""
PASSES = {"gathered in passes": 4, "trained through passes": 4}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, workers: int, **case: Any) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=workers,
        min_workers=workers,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    )


def by_hand(folder: Path, **case: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CASE": json.dumps(case), "STRETTO_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.result")}


def finish(harness: Harness, folder: Path, alone: Path, **case: Any) -> None:
    """All who were there to the end agree with a run by hand."""
    assert harness.wait_over()["event"] == "done", harness.describe()
    hand = by_hand(alone, **case)
    assert hand.returncode == 0, hand.stderr
    expected = results(alone)["alone"]["exact"]
    found = results(folder)
    assert found
    for one in found.values():
        assert np.allclose(one["exact"], expected, rtol=1e-9, atol=1e-12), harness.describe()


@pytest.mark.parametrize("kind", ALONE)
def test_a_mistake_is_refused_by_hand_and_elastic(tmp_path: Path, warm: ForkServer, kind: str) -> None:
    case = {"kind": kind, "per_worker": PASSES.get(kind), "pause_s": 0.0}
    hand = by_hand(tmp_path, **case)
    assert hand.returncode == 1
    assert ALONE[kind] in hand.stderr
    with start(tmp_path / "job", warm, 2, **case) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert ALONE[kind] in end["reason"]


@pytest.mark.parametrize("kind", TOGETHER)
def test_workers_that_do_different_things_are_told(tmp_path: Path, warm: ForkServer, kind: str) -> None:
    with start(tmp_path, warm, 2, kind=kind) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert TOGETHER[kind] in end["reason"]


@pytest.mark.parametrize("parts", [None, 5])
def test_whole_numbers_stay_whole(tmp_path: Path, warm: ForkServer, parts: int | None) -> None:
    """The script itself looks at them."""
    case = {"kind": "whole numbers", "loops": 1, "pause_s": 0.03, "per_worker": parts}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(2)
        harness.want(3)
        finish(harness, tmp_path, tmp_path, **case)


def test_a_child_of_a_worker_exchanges_nothing(tmp_path: Path) -> None:
    found = by_hand(tmp_path, kind="in a child")
    assert "a forked process cannot train in its parent's job" in found.stdout


def test_bodies_may_count_on_the_size_of_the_global_batch(tmp_path: Path, warm: ForkServer) -> None:
    """Also in a rehearsal, and in a pass in which a worker was lost."""
    case = {"kind": "counting on all", "loops": 2, "pause_s": 0.05}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(2)
        harness.want(3)
        harness.wait_members(3)
        harness.worker(harness.members()[1]).kill()
        finish(harness, tmp_path, tmp_path, **case)


def test_dicts_are_matched_by_their_keys(tmp_path: Path, warm: ForkServer) -> None:
    case = {"kind": "in any order", "loops": 1}
    with start(tmp_path, warm, 2, **case) as harness:
        finish(harness, tmp_path, tmp_path, **case)


def test_a_stop_in_a_batch_that_is_done_again_does_not_count(tmp_path: Path, warm: ForkServer) -> None:
    case = {"kind": "stopping", "loops": 2, "pause_s": 0.05}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(3)
        harness.worker(harness.members()[1]).kill()
        finish(harness, tmp_path, tmp_path, **case)


@pytest.mark.parametrize("kind", ["summed", "large"])
def test_sums_have_gradients(tmp_path: Path, warm: ForkServer, kind: str) -> None:
    case = {"kind": kind, "loops": 1, "pause_s": 0.03}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(2)
        harness.want(3)
        finish(harness, tmp_path, tmp_path, **case)


def test_whoever_passes_over_loops_gets_what_was_agreed_on_there(tmp_path: Path, warm: ForkServer) -> None:
    """Without `job.epochs` a newcomer goes through the whole script."""
    case = {"kind": "values", "loops": 6, "pause_s": 0.03}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(25)
        harness.want(3)
        harness.wait_members(3)
        harness.worker(harness.members()[0]).kill()
        harness.wait_members(2)
        assert harness.applied() < 60
        finish(harness, tmp_path, tmp_path, **case)
        assert "w2" in results(tmp_path)


def test_newcomers_begin_with_the_epoch_of_the_others(tmp_path: Path, warm: ForkServer) -> None:
    case = {"kind": "values in epochs", "loops": 6, "pause_s": 0.03}
    with start(tmp_path, warm, 2, **case) as harness:
        harness.wait_applied(25)
        harness.want(3)
        harness.wait_members(3)
        finish(harness, tmp_path, tmp_path, **case)
        assert "w2" in results(tmp_path)


def test_parts_are_computed_anew_for_those_who_are_left(tmp_path: Path, warm: ForkServer) -> None:
    case = {"kind": "parts", "loops": 6, "pause_s": 0.02}
    with start(tmp_path, warm, 3, **case) as harness:
        harness.wait_applied(22)
        harness.worker(harness.members()[1]).kill()
        harness.wait_members(2)
        finish(harness, tmp_path, tmp_path, **case)


def test_a_death_between_loops_and_a_newcomer_that_waits_for_the_next(tmp_path: Path, warm: ForkServer) -> None:
    case = {"kind": "standing between", "loops": 4}
    with start(tmp_path, warm, 3, **case) as harness:
        harness.wait(lambda: all((tmp_path / f"w{i}.go").exists() for i in range(3)), "all stand between loops")
        harness.want(4)
        harness.wait(lambda: "w3" in str(harness.last("announced")), "a newcomer is to come in")
        harness.worker("w1").kill()
        harness.wait(lambda: "w1" not in harness.last("announced")["members"], "the others have noticed")  # type: ignore[index]
        (tmp_path / "go").touch()
        finish(harness, tmp_path, tmp_path, **case)
        assert results(tmp_path).keys() - {"alone"} >= {"w0", "w2", "w3"}
