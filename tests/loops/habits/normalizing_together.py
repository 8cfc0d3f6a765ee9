"""SyncBatchNorm: what BatchNorm does on one worker."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True


def make() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv1d(2, 6, 2, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(12, 8, bias=False), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), nn.Linear(8, 3),
    ).double()  # fmt: skip


def plain() -> dict[str, Tensor]:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in order(size=25):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch].view(-1, 2, 3)), y[batch]).backward()
        optimizer.step()
    return {**tensors(model), "found": model.eval()(x.view(-1, 2, 3)).detach()}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(nn.SyncBatchNorm.convert_sync_batchnorm(make()))
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=25, epochs=8):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x.view(-1, 2, 3)), batch.y).backward()
        optimizer.step()
    return {**tensors(model), "found": model.eval()(x.view(-1, 2, 3)).detach()}
