"""Epochs of epochs, with a mean of all workers after each: repeats, and epochs in each of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True
REPEATS, EPOCHS = 3, 3


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for repeat in range(REPEATS):
        for epoch in range(EPOCHS):
            for batch in order(size=24, epochs=1, seed=10 * repeat + epoch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = F.cross_entropy(model(x), y).item()
            optimizer.param_groups[0]["lr"] *= 0.9 if loss < 1.0 else 0.97
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    data = TensorDataset(x, y)
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @torch.no_grad()
    def part() -> Tensor:
        mine = slice(job.rank, None, job.size)
        return F.cross_entropy(model(x[mine]), y[mine], reduction="sum")

    for repeat in job.epochs(REPEATS):
        for epoch in job.epochs(EPOCHS):
            for batch in job.batches(data, size=24, seed=10 * repeat + epoch):
                optimizer.zero_grad()
                F.cross_entropy(model(batch.x), batch.y).backward()
                optimizer.step()
            loss = float(job.all_reduce(part)) / len(x)
            optimizer.param_groups[0]["lr"] *= 0.9 if loss < 1.0 else 0.97
    return tensors(model)
