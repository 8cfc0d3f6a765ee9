"""Low-rank adapters on a frozen net: only they are given to the optimizer, with other rates for the two halves; the
merged weights are computed with `functional_call`, and clipped by value."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

from stretto.torch import Job


class Adapted(nn.Module):
    def __init__(self, base: nn.Sequential) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        torch.manual_seed(2)
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name, weight in base.named_parameters():
            if weight.ndim == 2:
                key = name.replace(".", "_")
                self.down[key] = nn.Parameter(torch.randn(2, weight.shape[1], dtype=torch.float64) / 3)
                self.up[key] = nn.Parameter(torch.zeros(weight.shape[0], 2, dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        merged = {
            name: weight + self.up[key] @ self.down[key]
            for name, weight in self.base.named_parameters()
            if (key := name.replace(".", "_")) in self.up
        }
        found: Tensor = functional_call(self.base, merged, (given,))
        return found


def make(model: Adapted) -> torch.optim.Optimizer:
    groups = [{"params": model.down.parameters(), "lr": 0.005}, {"params": model.up.parameters(), "lr": 0.08}]
    return torch.optim.AdamW(groups, lr=0.1)


def plain() -> dict[str, Tensor]:
    model = Adapted(net())
    optimizer = make(model)
    for batch in order():
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Adapted(net()))
    optimizer = job.optimizer(make(model))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
    return tensors(model)
