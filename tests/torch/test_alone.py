"""What a script may ask of its job, in a world of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler, TensorDataset

from stretto.torch import TrainingError
from stretto.torch.checkpoints import read_file
from stretto.torch.job import Job
from stretto.torch.state import Holder, assemble

DATA = TensorDataset(torch.randn(40, 2), torch.randn(40, 1))


class One:
    """A job, and a step for it."""

    def __init__(self) -> None:
        self.job = Job(torch.device("cpu"), None, None, Holder(), 0)
        self.model = self.job.model(nn.Linear(2, 1))
        self.optimizer = self.job.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

    def step(self, batch: Any) -> float:
        self.optimizer.zero_grad()
        loss = (self.model(batch.x) - batch.y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()


@pytest.fixture
def one() -> One:
    return One()


def test_a_loop_says_how_long_it_is(one: One) -> None:
    assert len(one.job.batches(DATA, size=15, epochs=2)) == 6
    assert len(one.job.batches(DATA, size=15, epochs=2, drop_last=True)) == 4
    assert len(one.job.steps(7)) == 7
    with pytest.raises(TypeError, match="drawn as they come"):
        len(one.job.batches(DATA, size=15, sampler=RandomSampler(DATA)))


def test_a_loop_that_is_left_for_a_while_goes_on(one: One) -> None:
    """By `next`, and by several `for`."""
    batches = one.job.batches(DATA, size=10)
    one.step(next(batches))
    for batch in batches:
        one.step(batch)
        break
    for batch in batches:
        one.step(batch)
    assert one.job.step == 4
    with pytest.raises(TrainingError, match="a second time"):
        iter(batches)


def test_noise_is_new_at_every_call_and_the_same_in_every_pass() -> None:
    drawn = {}
    for per_worker in (None, 3):
        one = One()
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for batch in one.job.batches(DATA, size=10, per_worker=per_worker, seed=5):
            for rows in found:
                rows.append(one.job.noise(4))
            one.step(batch)
        drawn[per_worker] = [torch.cat(rows) for rows in found]
    first, second = drawn[None]
    assert first.shape == second.shape == (40, 4)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, drawn[None], drawn[3]))


def test_an_optimizer_for_one_batch_is_nobodys_business(one: One) -> None:
    """An adversarial example, an inner loop."""
    for batch in one.job.batches(DATA, size=10):
        delta = torch.zeros_like(batch.x, requires_grad=True)
        attack = torch.optim.SGD([delta], lr=0.1)
        for _ in range(3):
            attack.zero_grad()
            one.model(batch.x + delta).sum().backward()
            attack.step()
        one.step(batch)


def test_what_an_attempt_saves_is_its_whole_step(one: One, tmp_path: Path) -> None:
    """With what the trainer does after it."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)
    batches = one.job.batches(DATA, size=10)

    def act(batch: Any) -> float:
        if one.job.step == 2:
            one.job.save(tmp_path / "saved")
        return one.step(batch)

    while one.job.attempt(act, batches) is not None:
        schedule.step()
    whole = assemble(*read_file(tmp_path / "saved"))
    assert whole["cursor"] == [0, 3, 3, 0]
    assert whole["helpers"][0]["last_epoch"] == 3


@pytest.mark.parametrize(
    "given", [{"size": 24.0}, {"size": "24"}, {"size": 24, "seed": None}, {"size": 24, "per_worker": 2.5}]
)
def test_what_is_no_number_is_refused(one: One, given: dict[str, Any]) -> None:
    with pytest.raises(TrainingError, match="give a whole number as"):
        one.job.batches(DATA, **given)


def test_what_is_no_weight_is_refused(one: One) -> None:
    with pytest.raises(TrainingError, match="the weight of a batch is no number"):
        next(one.job.batches(DATA, size=10, weight=lambda batch: None))  # type: ignore[arg-type, return-value]


def test_an_optimizer_can_be_forgotten(one: One) -> None:
    for batch in one.job.batches(DATA, size=10):
        one.step(batch)
    one.job.forget(one.optimizer)
    with pytest.raises(TrainingError, match="this SGD is not registered"):
        one.job.forget(one.optimizer)
    batch = next(one.job.batches(DATA, size=10))
    with pytest.raises(TrainingError, match="was not registered"):
        one.step(batch)
