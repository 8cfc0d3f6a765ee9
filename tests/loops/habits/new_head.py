"""A net whose last layer is replaced after a first training, with an optimizer anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


def head() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(16, 2).double()


def plain() -> dict[str, Tensor]:
    model = net()
    for epochs, wanted in ((4, y), (4, y % 2)):
        if epochs == 4 and wanted is not y:
            model[4] = head()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in order(epochs=epochs):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), wanted[batch]).backward()
            optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=4):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    job.forget(optimizer)
    model[4] = head()
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y % 2), size=24, epochs=4):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    return tensors(model)
