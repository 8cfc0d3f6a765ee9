"""What real scripts have and do, alone and as a job that grows and loses a worker: the same result, or one error."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.testing import Harness

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    # Compiling imports a lot.
    preload = ("torch", "stretto.torch", "torch._dynamo", "torch._functorch.aot_autograd")
    with ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=preload) as server:
        server.wait_ready()
        yield server


def alone(folder: Path, warm: ForkServer, script: str, **case: Any) -> tuple[int, str]:
    """One worker outside Stretto: how it ended and what it printed."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CASE": json.dumps(case), "STRETTO_FOLDER": str(folder)}
    log = folder / "alone.log"
    with launch([sys.executable, str(SCRIPTS / script)], env=environment, log=log, warm=warm) as process:
        return process.wait(60.0), log.read_text()


def start(folder: Path, warm: ForkServer, script: str, count: int = 2, **case: Any) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPTS / script)],
        workers=count,
        min_workers=count,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1", "STRETTO_CONNECT_S": "5"},
        options=chaos.OPTIONS,
        warm=warm,
    )


def grow_and_kill(harness: Harness, after: int) -> None:
    """A third worker comes, then the first or second is killed."""
    harness.wait_members(2)
    harness.wait_applied(after)
    harness.want(3)
    harness.wait(lambda: harness.over or len(harness.members()) == 3, "the third has come")
    assert not harness.over, harness.describe()
    harness.worker(harness.members()[1]).kill()


def compare(harness: Harness, right: Path, loops: dict[int, Loop], stopped: dict[int, int] | None = None) -> None:
    assert harness.wait_over()["event"] == "done", harness.describe()
    audit(ledger_files(harness.folder / "ledger"), loops, stopped=stopped).check()
    expected = json.loads((right / "alone.result").read_text())
    results = [json.loads(path.read_text()) for path in sorted(harness.folder.glob("w*.result"))]
    assert len(results) == 2
    for result in results:
        assert result["steps"] == expected["steps"]
        assert result["facts"] == expected["facts"]
        for kind, tolerance in (("exact", 1e-9), ("loose", 2e-2)):
            there, here = np.array(expected[kind]), np.array(result[kind])
            assert np.linalg.norm(here - there) <= tolerance * np.linalg.norm(there), kind
    assert results[0]["exact"] == results[1]["exact"], "the workers hold different weights"
    assert results[0]["loose"] == results[1]["loose"], "the workers hold different weights"


def together(
    folder: Path,
    warm: ForkServer,
    script: str,
    loops: dict[int, Loop],
    after: int = 5,
    stopped: dict[int, int] | None = None,
    **case: Any,
) -> None:
    """Alone, and as a job with a grow and a kill."""
    status, text = alone(folder / "alone", warm, script, **case)
    assert status == 0, text
    with start(folder / "job", warm, script, **case) as harness:
        grow_and_kill(harness, after)
        compare(harness, folder / "alone", loops, stopped)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation(tmp_path: Path, warm: ForkServer, workers: int) -> None:
    loops = {0: Loop(samples=250, size=24, epochs=6, seed=3, drop_last=True)}
    together(tmp_path, warm, "augmenting.py", loops, workers=workers)
    here = json.loads((tmp_path / "alone" / "alone.result").read_text())
    other = tmp_path / "other"
    status, text = alone(other, warm, "augmenting.py", workers=2 - workers)
    assert status == 0, text
    assert "optimizer.step()" not in text, "a scheduler warns"
    assert json.loads((other / "alone.result").read_text()) == here, "reading elsewhere changes nothing"


@pytest.mark.parametrize("per_worker", [None, 5])
def test_mixed_precision(tmp_path: Path, warm: ForkServer, per_worker: int | None) -> None:
    loops = {0: Loop(samples=240, size=24, epochs=20, seed=1)}
    together(tmp_path, warm, "mixed.py", loops, per_worker=per_worker, stopped={0: 62})


@pytest.mark.parametrize("told", [False, True], ids=["range", "epochs"])
@pytest.mark.parametrize("after", [3, 25], ids=["in the first loop", "in a later loop"])
def test_a_loop_for_each_epoch(tmp_path: Path, warm: ForkServer, after: int, told: bool) -> None:
    """Who comes in a later loop passes over the ones before, and what the script does between is not done twice."""
    loops = {epoch: Loop(samples=240, size=24, seed=epoch) for epoch in range(8)}
    together(tmp_path, warm, "epochwise.py", loops, after, told=told)


@pytest.mark.parametrize("layer", [False, True], ids=["same layers", "one more layer"])
@pytest.mark.parametrize("after", [3, 62])
def test_loops_that_train_other_parameters(tmp_path: Path, warm: ForkServer, layer: bool, after: int) -> None:
    loops = {stage: Loop(samples=240, size=24, epochs=3 if stage < 2 else 10, seed=stage) for stage in range(3)}
    together(tmp_path, warm, "staged.py", loops, after, layer=layer)


def test_what_is_evaluated_between_loops_is_alike_on_all_workers(tmp_path: Path, warm: ForkServer) -> None:
    """Though the statistics of BatchNorm are each worker's own in a loop."""
    with start(tmp_path, warm, "evaluating.py") as harness:
        grow_and_kill(harness, 12)
        assert harness.wait_over()["event"] == "done", harness.describe()
    one, other = (json.loads(path.read_text()) for path in tmp_path.glob("w*.result"))
    assert one == other


def test_compiled_models(tmp_path: Path, warm: ForkServer) -> None:
    together(tmp_path, warm, "compiled.py", {0: Loop(samples=240, size=24, epochs=20)})


ERRORS = {
    "exit 0": "the script ended inside its loop",
    "stream": "has no length",
    "sized stream": "streams are not supported yet",
    "loader": "size=24, but the DataLoader has batch_size=8",
    "loader of a stream": "streams are not supported yet",
    "empty": "the dataset has no samples",
    "too short": "the dataset has 10 samples, a global batch 24",
    "short": "the dataset has 10 samples, a global batch 24",
    "no epochs": "there must be at least 1",
    "reader raises": "KeyError: 'sample 33 is broken'",
    "reader dies": "Traceback",
    "lazy": "job.model",
    "stray": "belongs to no model",
    "interrupt": "KeyboardInterrupt",
    "exit 3 of one": "w1",
}


@pytest.mark.parametrize("trouble", ERRORS)
def test_trouble_ends_with_one_clear_error(tmp_path: Path, warm: ForkServer, trouble: str) -> None:
    with start(tmp_path, warm, "troubled.py", trouble=trouble) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert ERRORS[trouble] in end["reason"]
        assert any(worker.status for worker in harness.workers)


def test_a_terminated_worker_leaves(tmp_path: Path, warm: ForkServer) -> None:
    """SIGTERM is a planned leave at the next boundary: nobody else is disturbed."""
    assert alone(tmp_path / "alone", warm, "augmenting.py", workers=0)[0] == 0
    with start(tmp_path / "job", warm, "augmenting.py", 3, workers=0) as harness:
        harness.wait_members(3)
        leaver = harness.worker(harness.members()[0])
        leaver.process.signal(signal.SIGTERM)
        harness.wait(lambda: not leaver.running, "it has gone")
        compare(harness, tmp_path / "alone", {0: Loop(samples=250, size=24, epochs=6, seed=3, drop_last=True)})
        assert leaver.status == 0
        announced = [event for event in harness.events if event["event"] == "announced"]
        assert all(event["planned"] for event in announced[1:])


def test_the_number_of_steps_is_told_as_it_becomes_known(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, "lengths.py", count=1) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        said = [line for line in harness.workers[0].text().splitlines() if line.startswith("total")]
    assert [int(line.split()[1]) for line in said] == [3 * 10, 3 * 14, 3 * 14 + 3 * 2, 3 * 14 + 2 + 2 * 3, 3 * 14 + 9]
