"""Early stopping between epochs: patience, the best weights so far kept aside and loaded in the end, a plateau
scheduler on the same figure. All of it is state that newcomers need."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Job

EPOCHS = 30


class EarlyStopping:
    def __init__(self, patience: int = 3, min_epochs: int = 8) -> None:
        self.patience, self.min_epochs = patience, min_epochs
        self.best, self.bad, self.epochs = float("inf"), 0, 0
        self.weights: dict[str, Any] | None = None

    def __call__(self, loss: float, model: nn.Module) -> bool:
        self.epochs += 1
        if loss < self.best - 1e-3:
            self.best, self.bad, self.weights = loss, 0, copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience and self.epochs >= self.min_epochs

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Over a loader of its own, in batches, as evaluation functions are."""
    model.eval()
    total = 0.0
    for given, goal in DataLoader(TensorDataset(x[180:], y[180:]), batch_size=16):
        total += F.cross_entropy(model(given), goal, reduction="sum").item()
    model.train()
    return total / 60


def finished(model: nn.Module, stopping: EarlyStopping) -> dict[str, Tensor]:
    last = tensors(model)
    assert stopping.weights is not None
    model.load_state_dict(stopping.weights)
    assert stopping.epochs < EPOCHS
    return {**{f"last {name}": value.clone() for name, value in last.items()}, **tensors(model)}


def plain() -> dict[str, Tensor]:
    model, stopping = net(), EarlyStopping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = ReduceLROnPlateau(optimizer, patience=2)
    for epoch in range(EPOCHS):
        for batch in order(size=20, epochs=1, seed=epoch, samples=180):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        loss = evaluate(model)
        scheduler.step(loss)
        if stopping(loss, model):
            break
    return finished(model, stopping)


def elastic(job: Job) -> dict[str, Tensor]:
    model, stopping = job.model(net()), job.keep("stopping", EarlyStopping())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    scheduler = ReduceLROnPlateau(optimizer, patience=2)
    for epoch in job.epochs(EPOCHS):
        for batch in job.batches(TensorDataset(x[:180], y[:180]), size=20, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
        loss = evaluate(model)
        scheduler.step(loss)
        if stopping(loss, model):
            break
    return finished(model, stopping)
