"""The model of `elastic_resize.py` under Stretto; notes when each step begins, in a file of its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

torch.set_num_threads(1)
torch.manual_seed(0)
width, layers = int(os.environ["WIDTH"]), int(os.environ["LAYERS"])
job = stretto.join()
model = job.model(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
data = TensorDataset(torch.randn(240, width))
with Path(os.environ["STRETTO_FOLDER"], f"{os.environ['STRETTO_WORKER']}.steps").open("w", buffering=1) as notes:
    for batch in job.batches(data, size=12, epochs=100_000):
        notes.write(f"{time.monotonic()} {job.step} {job.size} {job.generation}\n")
        loss = model(batch.x.to(job.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
