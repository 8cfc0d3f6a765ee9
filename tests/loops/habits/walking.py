"""Batches taken in every way but a plain loop: by `next` in a `while`, through a progress bar and `enumerate`, and with
a `break` at a step that all know; by functions that are given the iterator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

T = TypeVar("T")


class Bar(Iterable[T]):
    """As tqdm: it holds an iterable, and counts."""

    def __init__(self, over: Iterable[T]) -> None:
        self.over, self.n = over, 0

    def __iter__(self) -> Iterator[T]:
        for one in self.over:
            yield one
            self.n += 1


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def learn(self, given: Tensor, goal: Tensor) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(given), goal).backward()
        self.optimizer.step()

    def walk(self, batches: Iterator[Any]) -> None:
        while True:
            try:
                given, goal = next(batches)
            except StopIteration:
                break
            self.learn(given, goal)


def plain() -> dict[str, Tensor]:
    trainer = Trainer(net())
    for seed in range(3):
        batches = [(x[batch], y[batch]) for batch in order(epochs=2, seed=seed)]
        trainer.walk(iter(batches))
        trainer.walk(iter(batches[:18]))
    return tensors(trainer.model)


def elastic(job: Job) -> dict[str, Tensor]:
    trainer = Trainer(job.model(net()))
    job.optimizer(trainer.optimizer)
    data = TensorDataset(x, y)
    # A loop that was left lives on until the next one is half done.
    held = None
    for seed in range(3):
        trainer.walk(job.batches(data, size=24, epochs=2, seed=seed))
        held = Bar(job.batches(data, size=24, epochs=2, seed=seed))
        for _, batch in enumerate(held):
            trainer.learn(batch.x, batch.y)
            if batch.step == 17:
                break
    return tensors(trainer.model)
