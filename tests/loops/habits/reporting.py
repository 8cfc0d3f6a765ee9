"""A log that one worker writes: opened by each leader once, a line for each step and one more for every tenth, though
the body runs more often than there are steps. Where a leader dies the next one may write its last line again."""

from __future__ import annotations

import os
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
    return {**tensors(model), "log": torch.tensor(sorted(lines))}


def elastic(job: Job) -> dict[str, Tensor]:
    folder = Path(sys.argv[2])
    path = folder / f"{os.environ.get('STRETTO_WORKER', 'alone')}.log"

    def log(line: float) -> None:
        with path.open("a") as file:
            file.write(f"{line}\n")

    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    job.on_leader(lambda: log(-1.0))
    own: list[int] = []
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=5):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if job.every(10):
            assert batch.last
            job.once_by_leader(log, 1000.0 + batch.step)
        job.once_by_leader(log, batch.step)
        job.once_per_step(lambda: own.append(job.step))
    assert own == list(range(own[0], 81)), "once for each step that this worker was a member in"
    lines = [[float(line) for line in log.read_text().split()] for log in folder.glob("*.log")]
    assert all(len(some) == len(set(some)) for some in lines), "twice by one worker"
    return {**tensors(model), "log": torch.tensor(sorted({line for some in lines for line in some}))}
