"""Batches that are left out: by `continue`, or because the loss function raises and the script catches it; what was
added up before them is still applied with the next fourth batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


class BadBatch(Exception):
    pass


def loss_of(step: int, model: nn.Module, given: Tensor, goal: Tensor) -> Tensor:
    if step % 7 == 3:
        raise BadBatch(step)
    return F.cross_entropy(model(given), goal) / 4


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step, batch in enumerate(order()):
        if step % 11 == 5:
            continue
        try:
            loss_of(step, model, x[batch], y[batch]).backward()
        except BadBatch:
            continue
        if step % 4 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        if batch.step % 11 == 5:
            continue
        try:
            loss_of(batch.step, model, batch.x, batch.y).backward()
        except BadBatch:
            continue
        if batch.step % 4 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(model)
