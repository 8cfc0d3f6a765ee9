"""Epochs with two loops each, every third with three; the rate depends on the epoch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

EPOCHS = 4


def loops(epoch: int) -> int:
    return 3 if epoch % 3 == 2 else 2


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = torch.zeros(2, dtype=torch.float64)
    for epoch in range(EPOCHS):
        for loop in range(loops(epoch)):
            for batch in order(epochs=1, seed=10 * epoch + loop):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + epoch)
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        seen = torch.tensor([epoch + 1.0, 0.0], dtype=torch.float64)
    return {**tensors(model), "epochs": seen}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    seen = torch.zeros(2, dtype=torch.float64)
    for epoch in job.epochs(EPOCHS):
        for loop in range(loops(epoch)):
            for batch in job.batches(TensorDataset(x, y), size=24, seed=10 * epoch + loop):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + epoch)
                optimizer.zero_grad()
                F.cross_entropy(model(batch.x), batch.y).backward()
                optimizer.step()
        seen = torch.tensor([epoch + 1.0, 0.0], dtype=torch.float64)
    return {**tensors(model), "epochs": seen}
