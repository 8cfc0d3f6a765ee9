"""Four updates on each batch, as in PPO: the loss is clipped round the policy that the batch began with. The worker
dies when some of them are done."""

from __future__ import annotations

import torch
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

DIES_IN = 3
advantages = torch.randn(240, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, seen: Tensor, acted: Tensor, worth: Tensor) -> None:
    with torch.no_grad():
        before = torch.log_softmax(model(seen), 1).gather(1, acted[:, None])[:, 0]
    for _ in range(4):
        now = torch.log_softmax(model(seen), 1).gather(1, acted[:, None])[:, 0]
        ratio = (now - before).exp()
        loss = -torch.min(ratio * worth, ratio.clamp(0.95, 1.05) * worth).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for batch in order():
        update(model, optimizer, x[batch], y[batch], advantages[batch])
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.005))
    for seen, acted, worth in job.batches(TensorDataset(x, y, advantages), size=24, epochs=8):
        update(model, optimizer, seen, acted, worth)
    return tensors(model)
