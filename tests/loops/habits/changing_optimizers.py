"""Adam for three epochs, then SGD, made when it is needed and registered by whoever comes later, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

EPOCHS = 8


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        if epoch >= 3 and isinstance(optimizer, torch.optim.Adam):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for batch in order(epochs=1, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer: torch.optim.Optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for epoch in job.epochs(EPOCHS):
        if epoch >= 3 and isinstance(optimizer, torch.optim.Adam):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
            job.optimizer(optimizer)
        for batch in job.batches(TensorDataset(x, y), size=24, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
    return tensors(model)
