"""A log that one worker writes: opened once, a line for each step and one more for every tenth, though the body runs
more often than there are steps."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lines = [-1.0]
    for step, batch in enumerate(order()):
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        lines += [1000.0 + step] if (step + 1) % 10 == 0 else []
        lines.append(float(step))
    return {**tensors(model), "log": torch.tensor(lines)}


def elastic(job: Job) -> dict[str, Tensor]:
    path = Path(sys.argv[2], "log")

    def log(line: float) -> None:
        if job.leader:
            with path.open("a") as file:
                file.write(f"{line}\n")

    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    job.on_leader(lambda: log(-1.0))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=5):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if job.every(10):
            assert batch.last
            log(1000.0 + batch.step)
        job.once_per_step(lambda step=batch.step: log(step))  # type: ignore[misc]
    return {**tensors(model), "log": torch.tensor([float(line) for line in path.read_text().split()])}
