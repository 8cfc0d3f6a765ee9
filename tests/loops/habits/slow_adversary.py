"""One net steps in every batch, the other only in every fourth, with gradients that it adds up; the last of them are
applied after the loop."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from common import net, order, tensors, x
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


def train(first: nn.Module, second: nn.Module, both: list[torch.optim.Optimizer], given: Iterable[Tensor]) -> None:
    for step, some in enumerate(given):
        both[0].zero_grad()
        (first(some).square().mean() + (second(some) - first(some).detach()).square().mean() / 4).backward()
        both[0].step()
        if step % 4 == 2:
            both[1].step()
            both[1].zero_grad()


def optimizers(first: nn.Module, second: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(first.parameters(), lr=0.01), torch.optim.SGD(second.parameters(), lr=0.1)]


def plain() -> dict[str, Tensor]:
    first, second = net(1), net(2)
    both = optimizers(first, second)
    train(first, second, both, (x[batch] for batch in order()))
    both[1].step()
    return tensors(first, second)


def elastic(job: Job) -> dict[str, Tensor]:
    first, second = job.model(net(1)), job.model(net(2))
    both = [job.optimizer(one) for one in optimizers(first, second)]
    batches = job.batches(TensorDataset(x), size=24, epochs=8)
    for batch in batches:
        some = batch.x
        both[0].zero_grad()
        (first(some).square().mean() + (second(some) - first(some).detach()).square().mean() / 4).backward()
        both[0].step()
        if batch.step % 4 == 2:
            both[1].step()
            both[1].zero_grad()
    both[1].step()
    return tensors(first, second)
