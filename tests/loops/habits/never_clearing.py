"""Gradients are never set to zero: each step is taken along the sum of all there were. A mistake, but the user's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in order():
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.001))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    return tensors(model)
