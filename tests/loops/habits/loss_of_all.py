"""A learning rate that falls when the loss does not, and a best loss: both on the loss of the global batch, after the
step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True


class Best:
    def __init__(self) -> None:
        self.loss, self.step = float("inf"), -1

    def look(self, loss: float, step: int) -> None:
        if loss < self.loss:
            self.loss, self.step = loss, step

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss, "step": self.step}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss, self.step = state["loss"], int(state["step"])


def result(model: torch.nn.Module, optimizer: torch.optim.Optimizer, best: Best) -> dict[str, Tensor]:
    figures = [optimizer.param_groups[0]["lr"], best.loss, best.step]
    return {**tensors(model), "figures": torch.tensor(figures, dtype=torch.float64)}


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler, best = ReduceLROnPlateau(optimizer, patience=2, factor=0.7), Best()
    for step, batch in enumerate(order()):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        best.look(loss.item(), step)
    return result(model, optimizer, best)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler, best = ReduceLROnPlateau(optimizer, patience=2, factor=0.7), job.keep("best", Best())
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        whole = job.all_reduce(loss.item(), "mean")
        scheduler.step(whole)
        best.look(whole, batch.step)
    return result(model, optimizer, best)
