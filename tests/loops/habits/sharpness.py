"""Sharpness-aware minimization as it is found on the web: weights are moved uphill by hand, and put back for the step
of an optimizer inside. The worker dies while they are moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job

DIES_IN = 2


class SAM(torch.optim.Optimizer):
    def __init__(self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        scale = self.param_groups[0]["rho"] / (self._norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        raise NotImplementedError

    def _norm(self) -> Tensor:
        return torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for batch in order():
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.first_step()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.second_step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    job.optimizer(optimizer.base_optimizer)
    for given, goal in job.batches(TensorDataset(x, y), size=24, epochs=8):
        F.cross_entropy(model(given), goal).backward()
        optimizer.first_step()
        F.cross_entropy(model(given), goal).backward()
        optimizer.second_step()
    return tensors(model)
