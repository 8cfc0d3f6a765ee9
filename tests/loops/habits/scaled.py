"""A gradient scaler that leaves out the steps whose loss is not finite, which the script reports."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job


def spoilt(step: int) -> float:
    return float("nan") if step % 9 == 4 else 1.0


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step, batch in enumerate(order()):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x[batch]), y[batch]) * spoilt(step)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {**tensors(model), "scale": torch.tensor(scaler.get_scale(), dtype=torch.float64)}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y) * spoilt(batch.step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        job.report(loss=loss)
    return {**tensors(model), "scale": torch.tensor(scaler.get_scale(), dtype=torch.float64)}
