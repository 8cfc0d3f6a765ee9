"""BatchNorm, an average of the weights, and an evaluation after every epoch: it sets the rate, and picks the best."""

from __future__ import annotations

import copy
from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import stretto.torch as stretto


class Best:
    def __init__(self) -> None:
        self.loss = float("inf")
        self.weights: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.weights = state["loss"], state["weights"]


torch.manual_seed(3)
job = stretto.join()
model = job.model(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.3))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.02)
average = job.keep("average", AveragedModel(model))
best = job.keep("best", Best())
for epoch in job.epochs(8):
    model.train()
    for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, seed=epoch):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        average.update_parameters(model)
        outcome.pause(job)
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(outcome.x), outcome.y).item()
    plateau.step(loss)
    if loss < best.loss:
        best.loss, best.weights = loss, copy.deepcopy(model.state_dict())
outcome.write(job, [*best.weights.values(), *model.state_dict().values()], rate=plateau.get_last_lr())
