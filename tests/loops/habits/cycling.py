"""One cycle of rate and momentum in one optimizer and many small ones in another, on two parts of a model; one is
fused, the other works on lists."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR
from torch.utils.data import TensorDataset

from stretto.torch import Job


def make(model: nn.Sequential) -> tuple[list[torch.optim.Optimizer], list[LRScheduler]]:
    adam = torch.optim.AdamW(model[:2].parameters(), lr=0.01, fused=True, amsgrad=True)
    sgd = torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    cycle = OneCycleLR(adam, max_lr=0.03, total_steps=80, pct_start=0.3)
    return [adam, sgd], [cycle, CyclicLR(sgd, 0.01, 0.2, step_size_up=7, mode="triangular2", cycle_momentum=True)]


def learn(parts: tuple[list[torch.optim.Optimizer], list[LRScheduler]], loss: Tensor) -> None:
    for optimizer in parts[0]:
        optimizer.zero_grad()
    loss.backward()
    for part in (*parts[0], *parts[1]):
        part.step()


def plain() -> dict[str, Tensor]:
    model = net()
    parts = make(model)
    for batch in order():
        learn(parts, F.cross_entropy(model(x[batch]), y[batch]))
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    parts = make(model)
    for optimizer in parts[0]:
        job.optimizer(optimizer)
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=7):
        learn(parts, F.cross_entropy(model(batch.x), batch.y))
    return tensors(model)
