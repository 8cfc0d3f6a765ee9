"""As large contrastive trainings do it: each worker compares its own rows with those of all workers, and a term of the
loss is about the mean of the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True


def make() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def plain() -> dict[str, Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in order(size=26):
        found = model(x[batch])
        apart = F.cross_entropy(found @ found.T, torch.arange(len(batch)))
        mean, square = found.mean(0), found.square().mean(0)
        optimizer.zero_grad()
        (apart + (square - mean.square()).sum()).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(make())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in job.batches(TensorDataset(x, y), size=26, epochs=8):
        found = model(batch.x)
        everybody = job.all_gather(found)
        places = job.all_gather(torch.tensor(batch.indices))
        target = torch.stack([(places == index).nonzero()[0, 0] for index in batch.indices])
        apart = F.cross_entropy(found @ everybody.T, target)
        means = job.all_reduce({"mean": found.mean(0), "square": found.square().mean(0)}, "mean")
        optimizer.zero_grad()
        (apart + (means["square"] - means["mean"].square()).sum()).backward()
        optimizer.step()
    return tensors(model)
