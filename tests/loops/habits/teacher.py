"""A mean teacher: its weights follow those of the student in each step, and the student is to agree with it; unlabelled
samples beside labelled ones, in one dataset of pairs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import Dataset

from stretto.torch import Job, chance


class Pairs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """A labelled sample, and one without a label."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return x[index], y[index], x[120 + (7 * index) % 120]


def learn(
    student: nn.Sequential, mean: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Tensor], noise: Tensor
) -> None:
    given, goal, more = parts
    loss = F.cross_entropy(checkpoint_sequential(student, 2, given, use_reentrant=False), goal)
    with torch.no_grad():
        wanted = torch.softmax(mean(more), 1)
    loss = loss + 2 * F.mse_loss(torch.softmax(student(more + 0.1 * noise), 1), wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for new, old in zip(student.parameters(), mean.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)


def plain() -> dict[str, Tensor]:
    student, mean, data = net(), net(8).requires_grad_(False), Pairs()
    optimizer = torch.optim.Rprop(student.parameters(), lr=0.001)
    for step, batch in enumerate(order(size=12, epochs=7, samples=120)):
        parts = [torch.stack(part) for part in zip(*(data[index] for index in batch), strict=True)]
        learn(student, mean, optimizer, parts, chance.noise(0, 0, step, batch, (6,), torch.float64))
    return tensors(student, mean)


def elastic(job: Job) -> dict[str, Tensor]:
    student, mean = job.model(net()), job.model(net(8).requires_grad_(False))
    optimizer = job.optimizer(torch.optim.Rprop(student.parameters(), lr=0.001))
    for batch in job.batches(Pairs(), size=12, epochs=7):
        learn(student, mean, optimizer, list(batch), job.noise(6, dtype=torch.float64))
    return tensors(student, mean)
