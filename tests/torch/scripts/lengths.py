"""Prints how many steps it is taken to have, whenever that changes: loops differ in length, and epochs of a sampler."""

from __future__ import annotations

from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

job = stretto.join()
model = job.model(outcome.net())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
said = 0


def step(x: Any, y: Any) -> None:
    global said
    assert job.world is not None
    if job.world.member.total != said:
        said = job.world.member.total
        print("total", said)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Growing:
    """An epoch has a batch more than the one before."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter([[0, 1, 2, 3]] * (2 + self.epoch))


data = TensorDataset(outcome.x, outcome.y)
for _ in job.epochs(3):
    for batch in job.batches(data, size=24):
        step(batch.x, batch.y)
    for _ in job.steps(4):
        step(outcome.x[:8], outcome.y[:8])
for batch in job.batches(data, batch_sampler=Growing(), epochs=3):
    step(batch.x, batch.y)
assert job.step == 3 * (10 + 4) + (2 + 3 + 4)
