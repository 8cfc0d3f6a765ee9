"""After each epoch every worker judges a part of the data, all agree on the figure, keep the best weights and lower the
learning rate when it gets worse; the leader picks a number for all."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

EPOCHS = 8
EXCHANGES = True


class Best:
    def __init__(self, model: torch.nn.Module) -> None:
        self.loss, self.weights = float("inf"), copy.deepcopy(model.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.weights = state["loss"], {name: one.clone() for name, one in state["weights"].items()}


def judged(model: torch.nn.Module, rank: int = 0, size: int = 1) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x[rank::size]), y[rank::size], reduction="sum")


def after(model: torch.nn.Module, optimizer: torch.optim.Optimizer, best: Best, loss: float, drop: float) -> None:
    if loss < best.loss:
        best.loss, best.weights = loss, copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] *= drop


def result(model: torch.nn.Module, best: Best, losses: list[float]) -> dict[str, Tensor]:
    kept = {f"best.{name}": one for name, one in best.weights.items()}
    return {**tensors(model), **kept, "best": torch.tensor(best.loss), "last": torch.tensor(losses[-1])}


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    best, losses = Best(model), []
    for epoch in range(EPOCHS):
        for batch in order(epochs=1, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        losses.append(float(judged(model)))
        after(model, optimizer, best, losses[-1], 1 - epoch / 40)
    return result(model, best, losses)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    best, losses = job.keep("best", Best(model)), []
    for epoch in job.epochs(EPOCHS):
        for batch in job.batches(TensorDataset(x, y), size=24, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
        losses.append(float(job.all_reduce(lambda: judged(model, job.rank, job.size))))
        drop = job.broadcast(lambda epoch=epoch: {"drop": 1 - epoch / 40})["drop"]
        after(model, optimizer, best, losses[-1], drop)
        job.barrier()
    return result(model, best, losses)
