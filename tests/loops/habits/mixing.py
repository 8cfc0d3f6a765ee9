"""MixUp with partners from the whole dataset, and CutMix in every other batch: how much is mixed is thrown by numpy,
alike on all workers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job, chance

labels = F.one_hot(y, 3).double()


def loss_of(model: nn.Module, step: int, indices: list[int], given: Tensor, goal: Tensor) -> Tensor:
    share, shift = float(np.random.beta(0.4, 0.4)), int(np.random.randint(1, 240))
    partners = [(index + shift) % 240 for index in indices]
    if step % 2:
        cut = round(6 * share)
        mixed = torch.cat([given[:, :cut], x[partners][:, cut:]], 1)
    else:
        mixed = share * given + (1 - share) * x[partners]
    return F.cross_entropy(model(mixed), share * goal + (1 - share) * labels[partners])


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(order(seed=3)):
        np.random.seed(chance.seed_of(3, 0, step) & 0xFFFFFFFF)
        optimizer.zero_grad()
        loss_of(model, step, batch, x[batch], labels[batch]).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, labels), size=24, epochs=8, seed=3, per_worker=11):
        optimizer.zero_grad()
        loss_of(model, batch.step, list(batch.indices), batch.x, batch.y).backward()
        optimizer.step()
    return tensors(model)
