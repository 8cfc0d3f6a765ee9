"""The recipe for mixed precision with the scaler switched off, as it is without a GPU: autocast to bfloat16, unscale,
clip, step, update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

TOLERANCE = 1e-2
"""What bfloat16 rounds depends on how the batch was cut."""


def small() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.GroupNorm(4, 16), nn.SiLU(), nn.Linear(16, 3))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    data: Iterable[tuple[Tensor, Tensor]],
) -> None:
    for given, goal in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(given.float())
        loss = F.cross_entropy(found.float(), goal)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def plain() -> dict[str, Tensor]:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), ((x[batch], y[batch]) for batch in order()))
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(small())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    batches = job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=9)
    train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), ((batch.x, batch.y) for batch in batches))
    return tensors(model)
