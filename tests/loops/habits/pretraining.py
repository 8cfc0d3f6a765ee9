"""A body is trained to rebuild its input; then a head is put on it, which is registered between the two loops with an
optimizer and a schedule of its own; other data, another batch size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from stretto.torch import Job


def parts() -> tuple[nn.Sequential, nn.Module]:
    return net()[:4], nn.Linear(16, 6).double()


def head() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, 3)).double()


def plain() -> dict[str, Tensor]:
    body, rebuild = parts()
    first = torch.optim.Adam([*body.parameters(), *rebuild.parameters()], lr=0.01)
    for batch in order(epochs=5):
        first.zero_grad()
        F.mse_loss(rebuild(body(x[batch])), x[batch]).backward()
        first.step()
    top = head()
    second = torch.optim.SGD([{"params": top.parameters()}, {"params": body.parameters(), "lr": 0.01}], lr=0.1)
    schedule = MultiStepLR(second, [5, 20])
    for batch in order(size=16, epochs=6, samples=100, seed=1):
        second.zero_grad()
        F.cross_entropy(top(body(x[batch])), y[batch]).backward()
        second.step()
        schedule.step()
    return tensors(body, rebuild, top)


def elastic(job: Job) -> dict[str, Tensor]:
    body, rebuild = map(job.model, parts())
    first = job.optimizer(torch.optim.Adam([*body.parameters(), *rebuild.parameters()], lr=0.01))
    for batch in job.batches(TensorDataset(x), size=24, epochs=5):
        first.zero_grad()
        F.mse_loss(rebuild(body(batch.x)), batch.x).backward()
        first.step()
    top = job.model(head())
    second = torch.optim.SGD([{"params": top.parameters()}, {"params": body.parameters(), "lr": 0.01}], lr=0.1)
    job.optimizer(second)
    schedule = MultiStepLR(second, [5, 20])
    for batch in job.batches(TensorDataset(x[:100], y[:100]), size=16, epochs=6, seed=1, per_worker=5):
        second.zero_grad()
        F.cross_entropy(top(body(batch.x)), batch.y).backward()
        second.step()
        schedule.step()
    return tensors(body, rebuild, top)
