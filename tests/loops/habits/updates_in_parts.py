"""Three updates on each batch by one optimizer, in parts of a slice, with a loss that is a mean over words: what a part
has of them says how much it counts, in every phase."""

from __future__ import annotations

import torch
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Batch, Job

DIES_IN = 8
"""Of three workers each has two parts of both batches of a step: in the second phase."""
counted = torch.rand(240, generator=torch.Generator().manual_seed(8)) < 0.6


def loss(model: nn.Module, given: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    found = nn.functional.cross_entropy(model(given), wanted, reduction="none")
    return found[counts].sum() / counts.sum().clamp(min=1)


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = list(order(size=12))
    for step in range(0, len(batches), 2):
        both = batches[step : step + 2]
        words = sum(int(counted[batch].sum()) for batch in both)
        for _ in range(3):
            optimizer.zero_grad()
            for batch in both:
                share = 2 * int(counted[batch].sum()) / words
                (loss(model, x[batch], y[batch], counted[batch]) * share).backward()
            optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))

    def update(batch: Batch) -> None:
        optimizer.zero_grad()
        loss(model, *batch).backward()
        optimizer.step()

    def words(batch: Batch) -> float:
        return float(batch[2].sum())

    data = TensorDataset(x, y, counted)
    for batch in job.batches(data, size=12, epochs=8, accumulate=2, per_worker=3, weight=words):
        job.phases(batch, update, update, update)
    return tensors(model)
