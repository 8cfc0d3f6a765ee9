"""A branch that is used for a while only, with gradients that are set to zero instead of none: its optimizer's moments
move it on. Spectral norm, and epochs that choose their samples by chance."""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from stretto.torch import Job, chance

EPOCHS = 8


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    branch = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3).double())
    return net(), branch


def learn(
    both: tuple[nn.Module, nn.Module], optimizer: torch.optim.Optimizer, epoch: int, given: Tensor, goal: Tensor
) -> None:
    optimizer.zero_grad(set_to_none=False)
    found = both[0](given) + (both[1](given) if epoch < 3 else 0.0)
    F.cross_entropy(found, goal).backward()
    optimizer.step()


def parameters(both: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for one in both for parameter in one.parameters()]


def plain() -> dict[str, Tensor]:
    both = nets()
    optimizer = torch.optim.Adam(parameters(both), lr=0.01)
    for epoch in range(EPOCHS):
        chance.begin_epoch(0, epoch, torch.device("cpu"))
        chosen = random.sample(range(240), 240)
        for batch in order(epochs=1, seed=epoch):
            some = [chosen[index] for index in batch]
            learn(both, optimizer, epoch, x[some], y[some])
    return tensors(*both)


def elastic(job: Job) -> dict[str, Tensor]:
    both = nets()
    for one in both:
        job.model(one)
    optimizer = job.optimizer(torch.optim.Adam(parameters(both), lr=0.01))
    for epoch in job.epochs(EPOCHS):
        chosen = Subset(TensorDataset(x, y), random.sample(range(240), 240))
        for batch in job.batches(chosen, size=24, seed=epoch):
            learn(both, optimizer, epoch, batch.x, batch.y)
    return tensors(*both)
