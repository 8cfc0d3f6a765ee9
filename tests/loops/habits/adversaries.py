"""Two optimizers that take turns in one body, one net frozen while the other learns, as in a GAN."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from common import net, order, tensors, x
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(6, 6).double(), net()


def train(maker: nn.Module, judge: nn.Module, optimizers: list[torch.optim.Optimizer], real: Iterable[Tensor]) -> None:
    first, second = optimizers
    for given in real:
        judge.requires_grad_(True)
        first.zero_grad()
        (F.softplus(-judge(given)[:, 0]).mean() + F.softplus(judge(maker(given).detach())[:, 0]).mean()).backward()
        first.step()
        judge.requires_grad_(False)
        second.zero_grad()
        F.softplus(-judge(maker(given))[:, 0]).mean().backward()
        second.step()


def plain() -> dict[str, Tensor]:
    maker, judge = nets()
    both: list[torch.optim.Optimizer] = [
        torch.optim.Adam(judge.parameters(), lr=0.01),
        torch.optim.Adam(maker.parameters(), lr=0.01),
    ]
    train(maker, judge, both, (x[batch] for batch in order()))
    return tensors(maker, judge)


def elastic(job: Job) -> dict[str, Tensor]:
    maker, judge = map(job.model, nets())
    both: list[torch.optim.Optimizer] = [
        job.optimizer(torch.optim.Adam(judge.parameters(), lr=0.01)),
        job.optimizer(torch.optim.Adam(maker.parameters(), lr=0.01)),
    ]
    train(maker, judge, both, (batch.x for batch in job.batches(TensorDataset(x), size=24, epochs=8)))
    return tensors(maker, judge)
