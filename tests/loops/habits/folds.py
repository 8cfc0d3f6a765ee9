"""Cross-validation: a fresh model, optimizer and schedule for each fold, and a list of results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Subset, TensorDataset

from stretto.torch import Job

FOLDS = 4


def fold_of(fold: int) -> tuple[list[int], list[int]]:
    return [i for i in range(240) if i % FOLDS != fold], [i for i in range(240) if i % FOLDS == fold]


@torch.no_grad()
def score(model: nn.Module, valid: list[int]) -> float:
    return float(F.cross_entropy(model(x[valid]), y[valid]))


class Scores:
    def __init__(self) -> None:
        self.all: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"all": self.all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.all = list(state["all"])


def plain() -> dict[str, Tensor]:
    scores, models = [], []
    for fold in range(FOLDS):
        train, valid = fold_of(fold)
        model = net(fold)
        models.append(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        schedule = ExponentialLR(optimizer, 0.9)
        for step, batch in enumerate(order(size=18, epochs=2, samples=180)):
            some = [train[index] for index in batch]
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), y[some]).backward()
            optimizer.step()
            if step == 9:
                schedule.step()
        scores.append(score(model, valid))
    return {**tensors(*models), "scores": torch.tensor(scores)}


def elastic(job: Job) -> dict[str, Tensor]:
    scores = job.keep("scores", Scores())
    data = TensorDataset(x, y)
    models = []
    for fold in range(FOLDS):
        train, valid = fold_of(fold)
        model = job.model(net(fold))
        models.append(model)
        optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.02))
        schedule = ExponentialLR(optimizer, 0.9)
        for batch in job.batches(Subset(data, train), size=18, epochs=2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
            if batch.step == 9:
                schedule.step()
        if len(scores.all) == fold:
            scores.all.append(score(model, valid))
    return {**tensors(*models), "scores": torch.tensor(scores.all)}
