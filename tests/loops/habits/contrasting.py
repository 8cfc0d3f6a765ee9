"""A loss that compares every sample of the global batch with every other one, over two views of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

EXCHANGES = True


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    encoder = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    scale = nn.ParameterList([nn.Parameter(torch.tensor(1.5, dtype=torch.float64))])
    return encoder, scale


def views(sample: Tensor) -> tuple[Tensor, Tensor]:
    return sample * 1.1, sample + 0.1 * sample.roll(1, dims=1)


def loss_of(one: Tensor, other: Tensor, scale: Tensor) -> Tensor:
    logits = F.normalize(one) @ F.normalize(other).T * scale.exp()
    target = torch.arange(len(one))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def plain() -> dict[str, Tensor]:
    encoder, scale = make()
    optimizer = torch.optim.Adam([*encoder.parameters(), *scale.parameters()], lr=0.01)
    for batch in order(size=23):
        one, other = views(x[batch])
        optimizer.zero_grad()
        loss_of(encoder(one), encoder(other), scale[0]).backward()
        optimizer.step()
    return tensors(encoder, scale)


def elastic(job: Job) -> dict[str, Tensor]:
    encoder, scale = map(job.model, make())
    optimizer = job.optimizer(torch.optim.Adam([*encoder.parameters(), *scale.parameters()], lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=23, epochs=8):
        one, other = views(batch.x)
        optimizer.zero_grad()
        loss_of(job.all_gather(encoder(one)), job.all_gather(encoder(other)), scale[0]).backward()
        optimizer.step()
    return tensors(encoder, scale)
