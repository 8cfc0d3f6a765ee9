"""A loop that ends when the weights are good enough, by their own length; and another one after it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

LONG = 8.2


def length(model: torch.nn.Module) -> float:
    return float(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).norm())


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    stops = False
    for epochs, seed in ((30, 0), (1, 1)):
        for batch in order(epochs=epochs, seed=seed):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            if stops and seed == 0:
                break
            stops = length(model) > LONG
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
    for epochs, seed in ((30, 0), (1, 1)):
        for batch in job.batches(TensorDataset(x, y), size=24, epochs=epochs, seed=seed):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
            if seed == 0 and length(model) > LONG:
                job.stop()
    return tensors(model)
