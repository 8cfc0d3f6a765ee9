"""A training that takes its steps one by one with `job.attempt`; options are in CASE."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.torch import Batch
from stretto.torch.groups import GroupBroken
from stretto.torch.reducer import Reducer

folder = os.environ["STRETTO_FOLDER"]
job = stretto.join()
model = job.model(outcome.net())
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
average = job.model(copy.deepcopy(model).requires_grad_(False))
how = outcome.CASE.get("how", "")


def train_step(batch: Batch) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch.x), batch.y)
    loss.backward()
    optimizer.step()
    if batch.last and how != "apart":
        outcome.pause(job)
    if how == "exit" and job.step == 26:
        sys.exit(0)
    if how == "stop" and job.step == 30:
        job.stop()
    if how == "raise" and job.step == 26:
        raise ValueError("the script is wrong")
    return loss.detach()


def train(loop: int) -> None:
    """A loop of 60 steps, unless it is left early."""
    batches = job.batches(TensorDataset(outcome.x, outcome.y), size=24, epochs=6, seed=loop, per_worker=5)
    seen: list[int] = []
    while job.attempt(train_step, batches if loop else None) is not None:
        seen.append(job.step)
        # What is changed here belongs to the state as well.
        scheduler.step()
        for mine, given in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(given.detach(), 0.1)
        if how == "save" and job.step == 40:
            job.save(Path(folder, "saved"))
        if how == "break" and job.step == 40:
            break
    if seen:
        # A worker that came in the second loop has not seen the first.
        assert seen == list(range(seen[0], job.step + 1)), f"not each step once: {seen}"


def fail_apart(wait: Any) -> Any:
    """On one worker a sum fails that the others have."""

    def wrapped(self: Reducer) -> None:
        wait(self)
        if job.step == 20 and job.rank == 1 and self.failed is None and not Path(folder, "failed").exists():
            Path(folder, "failed").touch()
            self.failed = GroupBroken("made up")

    return wrapped


if how == "apart":
    Reducer._wait = fail_apart(Reducer._wait)  # type: ignore[method-assign]
for loop in range(2):
    train(loop)
outcome.write(job, [*model.state_dict().values(), *average.state_dict().values()], rate=scheduler.get_last_lr())
