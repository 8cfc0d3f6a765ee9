"""Gradients are added up over four batches, and applied with the last of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(order()):
        (F.cross_entropy(model(x[batch]), y[batch]) / 4).backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=10):
        (F.cross_entropy(model(batch.x), batch.y) / 4).backward()
        if (job.step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(model)
