"""Random numbers in the body: noise for each sample, and a coin that all workers throw alike."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job, chance


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step, batch in enumerate(order(seed=5)):
        random.seed(chance.seed_of(5, 0, step))
        np.random.seed(chance.seed_of(5, 0, step) & 0xFFFFFFFF)
        noise = chance.noise(5, 0, step, batch, (6,), torch.float64)
        optimizer.zero_grad()
        given = x[batch] + noise * np.random.uniform()
        if random.random() < 0.5:
            given = -given
        F.cross_entropy(model(given), y[batch]).backward()
        optimizer.step()
    chance.end_loop(5, 0, torch.device("cpu"))
    return {**tensors(model), "after": torch.rand(3, dtype=torch.float64)}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, seed=5, per_worker=10):
        optimizer.zero_grad()
        given = batch.x + job.noise(6, dtype=torch.float64) * np.random.uniform()
        if random.random() < 0.5:
            given = -given
        F.cross_entropy(model(given), batch.y).backward()
        optimizer.step()
    return {**tensors(model), "after": torch.rand(3, dtype=torch.float64)}
