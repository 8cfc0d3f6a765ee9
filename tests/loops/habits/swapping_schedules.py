"""Stochastic weight averaging: from the middle on another scheduler is stepped, and epochs are averaged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Job

EPOCHS, BEGIN = 8, 4


def make(model: nn.Module) -> tuple[torch.optim.Optimizer, Any, SWALR, AveragedModel]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    warm = CosineAnnealingWarmRestarts(optimizer, T_0=2)
    return optimizer, warm, SWALR(optimizer, swa_lr=0.05, anneal_epochs=2), AveragedModel(model)


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer, scheduler, later, average = make(model)
    for epoch in range(EPOCHS):
        for batch in order(epochs=1, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch >= BEGIN:
            average.update_parameters(model)
            later.step()
        else:
            scheduler.step()
    return tensors(model, average)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer, scheduler, later, average = make(model)
    job.optimizer(optimizer)
    job.keep("swa", average)
    loader = DataLoader(TensorDataset(x, y), batch_size=24, shuffle=True)
    for epoch in job.epochs(EPOCHS):
        for given, goal in job.batches(loader, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(given), goal).backward()
            optimizer.step()
        if epoch >= BEGIN:
            average.update_parameters(model)
            later.step()
        else:
            scheduler.step()
    return tensors(model, average)
