"""Data that is made on the way: each worker makes its part of what the step's number says."""

from __future__ import annotations

import torch
from common import net, tensors
from torch import Tensor

from stretto.torch import Job

STEPS = 80


def made(step: int) -> Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(made(step)).square().sum(1).mean().backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for turn in job.steps(STEPS):
        optimizer.zero_grad()
        own = made(turn.step)[turn.place :: turn.places]
        # All places count alike: a sum, divided by what one of them has on average.
        (model(own).square().sum(1).sum() / (24 / turn.places)).backward()
        optimizer.step()
    return tensors(model)
