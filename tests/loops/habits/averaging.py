"""A moving average of the weights, clipping, a cosine schedule with a warm-up, groups without decay; evaluation and the
best average of all epochs between loops."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from stretto.torch import Job


class Best:
    """The weights with the lowest loss so far."""

    def __init__(self) -> None:
        self.loss, self.weights = float("inf"), dict[str, Tensor]()

    def look(self, model: nn.Module) -> None:
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x), y))
        if loss < self.loss:
            self.loss, self.weights = loss, copy.deepcopy(dict(model.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.weights = state["loss"], state["weights"]


def parts() -> tuple[nn.Sequential, AveragedModel, torch.optim.Optimizer, LRScheduler]:
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02)
    warm, cold = LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, 70)
    return model, average, optimizer, SequentialLR(optimizer, [warm, cold], [10])


def learn(
    model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LRScheduler, given: Tensor, goal: Tensor
) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(given), goal, label_smoothing=0.1).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    schedule.step()


def plain() -> dict[str, Tensor]:
    model, average, optimizer, schedule = parts()
    best = Best()
    for epoch in range(8):
        for batch in order(epochs=1, seed=epoch):
            learn(model, optimizer, schedule, x[batch], y[batch])
            average.update_parameters(model)
        best.look(average)
    return {**tensors(model, average), **best.weights}


def elastic(job: Job) -> dict[str, Tensor]:
    model, average, optimizer, schedule = parts()
    job.model(model)
    job.optimizer(optimizer)
    job.keep("average", average)
    best = job.keep("best", Best())
    for epoch in job.epochs(8):
        for batch in job.batches(TensorDataset(x, y), size=24, seed=epoch):
            learn(model, optimizer, schedule, batch.x, batch.y)
            average.update_parameters(model)
        best.look(average)
    return {**tensors(model, average), **best.weights}
