"""Hooks on parameters that mask and scale gradients, and noise on what came out, seeded by the step; a head for each of
three tasks, of which every batch has one; gradients that stay zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()[:4]
        torch.manual_seed(3)
        self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 1), nn.Linear(16, 6)]).double()
        mask = (torch.rand(16, 6, generator=torch.Generator().manual_seed(1)) > 0.5).double()
        self.body[0].weight.register_hook(lambda gradient: gradient * mask)
        for parameter in self.heads.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)

    def loss(self, step: int, given: Tensor, goal: Tensor) -> Tensor:
        found = self.heads[step % 3](self.body(given))
        if step % 3 == 0:
            return F.cross_entropy(found, goal)
        return F.mse_loss(found, given.sum(1, keepdim=True) if step % 3 == 1 else given.flip(1))


def add_noise(model: nn.Module, step: int) -> None:
    chance = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=chance, dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    model = Tasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01)
    for step, batch in enumerate(order()):
        optimizer.zero_grad(set_to_none=False)
        model.loss(step, x[batch], y[batch]).backward()
        add_noise(model, step)
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Tasks())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        optimizer.zero_grad(set_to_none=False)
        model.loss(batch.step, batch.x, batch.y).backward()
        add_noise(model, batch.step)
        optimizer.step()
    return tensors(model)
