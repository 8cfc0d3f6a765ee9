"""A trainer that counts its steps itself, and changes rates between them: it hears of a step when that is applied."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Batch, Job

STEPS = 80


class Trainer:
    """Knows nothing of workers: `attempt` does one step, and says its loss, or that there is none left."""

    def __init__(self, optimizer: torch.optim.Optimizer, attempt: Callable[[], Tensor | None]) -> None:
        self.optimizer, self.attempt = optimizer, attempt
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        self.count = 0

    def train(self, callbacks: list[Callable[[int], None]]) -> None:
        while self.attempt() is not None:
            self.count += 1
            self.scheduler.step()
            if self.count % 5 == 0:
                self.optimizer.param_groups[0]["weight_decay"] += 0.001
            for callback in callbacks:
                callback(self.count)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, given: Tensor, wanted: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(given), wanted)
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain() -> dict[str, Tensor]:
    model, batches = net(), order()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def attempt() -> Tensor | None:
        batch = next(batches, None)
        return None if batch is None else update(model, optimizer, x[batch], y[batch])

    Trainer(optimizer, attempt).train([])
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    batches: Iterator[Batch] = job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=5)
    path, seen = Path(sys.argv[2], "log"), list[int]()

    def attempt() -> Tensor | None:
        found: Tensor | None = job.attempt(lambda batch: update(model, optimizer, batch.x, batch.y), batches)
        if found is not None and not seen:
            # A worker that comes later goes on with the count of the job.
            trainer.count = job.step - 1
        return found

    def log(count: int) -> None:
        seen.append(count)
        assert count == job.step
        if job.leader:
            with path.open("a") as file:
                file.write(f"{count}\n")

    trainer = Trainer(optimizer, attempt)
    trainer.train([log])
    assert seen == list(range(STEPS + 1 - len(seen), STEPS + 1)), "each once, since this worker came"
    if job.leader:
        assert path.read_text().split() == [str(count) for count in range(1, STEPS + 1)]
    return tensors(model)
