"""A model that makes a table in its first forward pass, and a longer one later: positions of longer texts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

LONGER_FROM = 30


class Positions(nn.Module):
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(6, 3).double()
        self.register_buffer("table", None)

    def forward(self, given: Tensor, longest: int) -> Tensor:
        if self.table is None or len(self.table) < longest:
            self.table = torch.linspace(0, longest / 6, longest, dtype=torch.float64)
        found: Tensor = self.linear(given + self.table[:6])
        return found


def longest(step: int) -> int:
    return 6 if step < LONGER_FROM else 9


def plain() -> dict[str, Tensor]:
    model = Positions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(order()):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch], longest(step)), y[batch]).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Positions())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x, longest(batch.step)), batch.y).backward()
        optimizer.step()
    return tensors(model)
