"""The rate falls when the loss on a validation set does not: evaluated on all of it by every worker, in the body of
every fifth step, with the model switched to evaluation and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from stretto.torch import Job

train, valid = slice(0, 180), slice(180, 240)


def validation(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x[valid]), y[valid]).item()
    model.train()
    return loss


def make(model: nn.Module) -> tuple[torch.optim.Optimizer, ReduceLROnPlateau]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer, scheduler = make(model)
    for step, batch in enumerate(order(size=20, epochs=8, samples=180)):
        loss = F.cross_entropy(model(x[train][batch]), y[train][batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 5 == 0:
            scheduler.step(validation(model))
    return {**tensors(model), "rate": torch.tensor(optimizer.param_groups[0]["lr"])}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer, scheduler = make(model)
    job.optimizer(optimizer)
    for given, goal in job.batches(TensorDataset(x[train], y[train]), size=20, epochs=8, per_worker=6):
        loss = F.cross_entropy(model(given), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if job.every(5):
            scheduler.step(validation(model))
    return {**tensors(model), "rate": torch.tensor(optimizer.param_groups[0]["lr"])}
