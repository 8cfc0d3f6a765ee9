"""Two optimizers that step together at the end of the body, in several passes: rows of an embedding, and the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

words = torch.randint(0, 30, (240, 5), generator=torch.Generator().manual_seed(2))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table, self.last = nn.EmbeddingBag(30, 8), nn.Linear(8, 3)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.last(self.table(given))
        return found


def optimizers(model: Bag) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adagrad(model.table.parameters(), lr=0.1),
        torch.optim.AdamW(model.last.parameters(), lr=0.01, weight_decay=0.1),
    ]


def plain() -> dict[str, Tensor]:
    model = Bag().double()
    both = optimizers(model)
    for batch in order():
        for optimizer in both:
            optimizer.zero_grad()
        F.cross_entropy(model(words[batch]), y[batch]).backward()
        for optimizer in both:
            optimizer.step()
    return dict(model.state_dict())


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Bag().double())
    both = [job.optimizer(optimizer) for optimizer in optimizers(model)]
    for batch in job.batches(TensorDataset(words, y), size=24, epochs=8, per_worker=7):
        for optimizer in both:
            optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        for optimizer in both:
            optimizer.step()
    return dict(model.state_dict())
