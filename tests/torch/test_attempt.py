"""Steps that are taken one by one: when `attempt` returns, its step is applied, whatever happened meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
from test_real_scripts import alone, compare, start, together
from torch import nn
from torch.utils.data import TensorDataset

from stretto.backends.local.forkserver import ForkServer
from stretto.runtime.order import Loop
from stretto.torch import Batch, Job, TrainingError
from stretto.torch.checkpoints import read_file
from stretto.torch.state import Holder, assemble

DATA = TensorDataset(torch.ones(30, 2))
LOOPS = {number: Loop(samples=240, size=24, epochs=6, seed=number) for number in range(2)}


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.mark.parametrize(
    ("how", "stopped"),
    [("", {}), ("stop", {0: 32}), ("break", {0: 40}), ("save", {})],
    ids=["to the end", "stopped", "left", "saved between steps"],
)
def test_resizes_and_losses(tmp_path: Path, warm: ForkServer, how: str, stopped: dict[int, int]) -> None:
    together(tmp_path, warm, "attempting.py", LOOPS, stopped=stopped, how=how)
    if how == "save":
        found = [assemble(*read_file(tmp_path / where / "saved"))["cursor"] for where in ("alone", "job")]
        assert found == [[0, 40, 40, 0]] * 2


def test_a_worker_that_comes_in_a_later_loop(tmp_path: Path, warm: ForkServer) -> None:
    together(tmp_path, warm, "attempting.py", LOOPS, after=65)


def test_a_step_that_failed_here_and_was_applied_by_others(tmp_path: Path, warm: ForkServer) -> None:
    """What the script does between two steps is done once to the state, and by every worker."""
    status, text = alone(tmp_path / "alone", warm, "attempting.py")
    assert status == 0, text
    with start(tmp_path / "job", warm, "attempting.py", 2, how="apart") as harness:
        compare(harness, tmp_path / "alone", LOOPS)
    assert (tmp_path / "job" / "failed").exists()


def test_a_leaver_ends_from_inside(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, "attempting.py", 3) as harness:
        harness.wait_members(3)
        harness.want(2)
        harness.wait_members(2)
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert [worker.status for worker in harness.workers] == [0, 0, 0]
        assert len(list(tmp_path.glob("w*.result"))) == 2


def test_a_checkpoint_is_gone_on_from(tmp_path: Path, warm: ForkServer) -> None:
    status, text = alone(tmp_path / "alone", warm, "attempting.py")
    assert status == 0, text
    job = start(tmp_path / "job", warm, "attempting.py", 2)
    job.environment["STRETTO_CHECKPOINT_S"] = "0.2"
    with job as harness:
        harness.wait(lambda: bool(list(tmp_path.glob("job/checkpoints/step-*"))), "a checkpoint")
        for worker in harness.workers:
            worker.kill()
        harness.launch(2)
        assert harness.wait_over()["event"] == "done", harness.describe()
    right, *others = (
        torch.tensor(json.loads(path.read_text())["exact"])
        for path in (tmp_path / "alone" / "alone.result", *(tmp_path / "job").glob("w*.result"))
    )
    assert len(others) == 2
    assert all(float((one - right).norm() / right.norm()) < 1e-9 for one in others)


@pytest.mark.parametrize(
    ("how", "error"),
    [("exit", "the script ended inside its loop, at step 26 of 60"), ("raise", "ValueError: the script is wrong")],
)
def test_a_function_that_does_not_return(tmp_path: Path, warm: ForkServer, how: str, error: str) -> None:
    with start(tmp_path, warm, "attempting.py", 2, how=how) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert error in end["reason"]


class One:
    """A world of one, and a step for it."""

    def __init__(self) -> None:
        self.job = Job(torch.device("cpu"), None, None, Holder(), 0)
        self.model = self.job.model(nn.Linear(2, 1))
        self.optimizer = self.job.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.calls = 0

    def step(self, batch: Any) -> int:
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 2)).mean().backward()
        self.optimizer.step()
        self.calls += 1
        return self.calls


def test_what_it_returns() -> None:
    one = One()
    batches = one.job.batches(DATA, size=10, per_worker=4)
    found = [one.job.attempt(one.step, batches) for _ in range(5)]
    assert found == [3, 6, 9, None, None], "of the last pass of each step; then the loop is over"
    assert one.job.step == 3


def test_the_loop_made_last_and_loops_without_data() -> None:
    one = One()
    one.job.batches(DATA, size=30)
    assert one.job.attempt(one.step) == 1
    assert one.job.attempt(one.step) is None
    one.job.steps(2)
    assert [one.job.attempt(one.step), one.job.attempt(one.step), one.job.attempt(one.step)] == [2, 3, None]
    assert one.job.step == 3


def test_a_loop_that_is_gone_on_with_in_the_ordinary_way() -> None:
    one = One()
    batches = one.job.batches(DATA, size=10)
    assert one.job.attempt(one.step, batches) == 1
    assert one.job.step == 1
    for batch in batches:
        one.step(batch)
    assert (one.calls, one.job.step) == (3, 3)


def test_a_loop_after_one_that_was_left_by_break() -> None:
    one = One()
    held = one.job.batches(DATA, size=10)
    for batch in held:
        one.step(batch)
        break
    one.job.batches(DATA, size=10)
    assert [one.job.attempt(one.step) for _ in range(4)] == [2, 3, 4, None]


def test_another_loop_begins_where_one_is_left() -> None:
    one = One()
    first = one.job.batches(DATA, size=10)
    one.job.attempt(one.step, first)
    for batch in one.job.batches(DATA, size=10):
        one.step(batch)
    assert one.job.step == 4
    with pytest.raises(TrainingError, match="the loop was left when another one began"):
        one.job.attempt(one.step, first)


def returns_nothing(one: One, batches: Iterator[Batch]) -> None:
    one.job.attempt(lambda batch: [one.step(batch)].clear(), batches)


def no_function(one: One, batches: Iterator[Batch]) -> None:
    one.job.attempt(batches, one.step)  # type: ignore[arg-type]


def no_loop(one: One, batches: Iterator[Batch]) -> None:
    one.job.attempt(one.step, enumerate(batches))


def in_a_body(one: One, batches: Iterator[Batch]) -> None:
    for _ in batches:
        one.job.attempt(one.step, batches)


def in_each_other(one: One, batches: Iterator[Batch]) -> None:
    one.job.attempt(lambda batch: one.job.attempt(one.step, batches), batches)


def no_loop_yet(one: One, batches: Iterator[Batch]) -> None:
    One().job.attempt(one.step)


MISTAKES = {
    returns_nothing: "its function returned None, which is how attempt() says that the loop is over",
    no_function: "the first argument is a Batches",
    no_loop: "the loop is a enumerate",
    in_a_body: "this is the body of the loop, or one that has failed",
    in_each_other: "attempt() was called by the function of another attempt",
    no_loop_yet: "there is no loop",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_clear_error(mistake: Callable[[One, Iterator[Batch]], None]) -> None:
    one = One()
    with pytest.raises(TrainingError) as raised:
        mistake(one, one.job.batches(DATA, size=10))
    assert MISTAKES[mistake] in str(raised.value)
