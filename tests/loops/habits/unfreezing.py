"""Fine-tuning: layers are thawed in the body as training goes, the last of them with a group of its own; one is frozen
again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


def thaw(step: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    if step == 0:
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
    elif step == 11:
        model[2].requires_grad_(True)
    elif step == 23:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.02})
    elif step == 50:
        model[4].bias.requires_grad_(False)


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam([*model[2].parameters(), *model[4].parameters()], lr=0.01)
    for step, batch in enumerate(order()):
        thaw(step, model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam([*model[2].parameters(), *model[4].parameters()], lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        thaw(batch.step, model, optimizer)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    return tensors(model)
