"""Figures of the global batch where a step takes several passes, and a clipping that follows the largest loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True


class Tally:
    def __init__(self) -> None:
        self.right, self.losses, self.worst = 0, 0.0, 0.0

    def add(self, right: int, loss: float, worst: float) -> None:
        self.right, self.losses, self.worst = self.right + right, self.losses + loss, max(self.worst, worst)

    def state_dict(self) -> dict[str, float]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update(state)


def result(model: torch.nn.Module, tally: Tally) -> dict[str, Tensor]:
    return {**tensors(model), "tally": torch.tensor([tally.right, tally.losses, tally.worst], dtype=torch.float64)}


def plain() -> dict[str, Tensor]:
    model, tally = net(), Tally()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for batch in order(size=25):
        found = model(x[batch])
        each = F.cross_entropy(found, y[batch], reduction="none")
        optimizer.zero_grad()
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), each.max().item() / 10)
        optimizer.step()
        tally.add(int((found.argmax(1) == y[batch]).sum()), each.mean().item(), each.max().item())
    return result(model, tally)


def elastic(job: Job) -> dict[str, Tensor]:
    model, tally = job.model(net()), job.keep("tally", Tally())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.2))
    for batch in job.batches(TensorDataset(x, y), size=25, epochs=8, per_worker=4):
        found = model(batch.x)
        each = F.cross_entropy(found, batch.y, reduction="none")
        right = job.all_reduce((found.argmax(1) == batch.y).sum())
        loss = job.all_reduce(each.mean(), "mean")
        worst = job.all_reduce(each.max(), "max")
        optimizer.zero_grad()
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), worst.item() / 10)
        optimizer.step()
        if batch.last:
            tally.add(right.item(), loss.item(), worst.item())
    return result(model, tally)
