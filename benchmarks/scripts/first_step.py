"""Trains a tiny model elastically; notes in files of its folder when a worker's first step was over, and its last.

    first_step.py FOLDER EPOCHS

An epoch is one step. With more than one it takes 5 ms each, and ends early when FOLDER/end is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import stretto.torch as stretto

folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
worker = os.environ.get("STRETTO_WORKER", "alone")


def note(what: str) -> None:
    """Whole or not at all."""
    now_s = time.monotonic()
    path = folder / f".{worker}.{what}"
    path.write_text(str(now_s))
    path.rename(folder / f"{worker}.{what}")


torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(32, 64), torch.zeros(32, dtype=torch.long))
first = True
for batch in job.batches(data, size=32, epochs=epochs):
    loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss.item()
    if first:
        note("first")
        first = False
    if epochs > 1:
        time.sleep(0.005)
        if (folder / "end").exists():
            job.stop()
note("last")
