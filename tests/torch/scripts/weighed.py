"""A loss that is a mean over tokens, of which samples have different numbers; over several batches if asked.

With "plain" in CASE there is no job at all: the same training, written out by hand over whole global batches.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.runtime.order import Loop, indices

case = json.loads(os.environ["CASE"])
size, accumulate, epochs = case["size"], case.get("accumulate", 1), case["epochs"]
generator = torch.Generator().manual_seed(1)
x = torch.randn(case["samples"], 5, 6, generator=generator, dtype=torch.float64)
lengths = torch.randint(0, 6, (case["samples"],), generator=generator)
mask = torch.arange(5)[None, :] < lengths[:, None]

torch.manual_seed(7)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
last_epoch = 0


def loss_of(inputs: Tensor, kept: Tensor) -> Tensor:
    """A mean over tokens; over none of them it is not a number."""
    errors = (net(inputs).squeeze(-1) - inputs.sum(-1).sin()).square()
    if case.get("weighed"):
        return errors[kept].mean() / accumulate
    return errors.mean() / accumulate


def by_hand() -> int:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loop = Loop(samples=case["samples"], size=size * accumulate, epochs=epochs, seed=0)
    for step in range(loop.total_steps):
        chosen = torch.from_numpy(indices(loop, step))
        optimizer.zero_grad()
        batches = chosen.split(size)
        tokens = [int(mask[batch].sum()) for batch in batches]
        for batch, count in zip(batches, tokens, strict=True):
            share = len(batches) * count / sum(tokens) if case.get("weighed") else 1.0
            (share * loss_of(x[batch], mask[batch])).backward()
        optimizer.step()
    return loop.total_steps


def by_job() -> int:
    job = stretto.join()
    job.model(net)
    optimizer = job.optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    options: dict[str, Any] = {"accumulate": accumulate, "per_worker": case.get("per_worker")}
    if case.get("weighed"):
        options["weight"] = lambda batch: batch.y.sum()
    for batch in job.batches(TensorDataset(x, mask), size=size, epochs=epochs, **options):
        loss_of(batch.x, batch.y).backward()
        if not case.get("no step"):
            optimizer.step()
        optimizer.zero_grad()
        if case["pause_s"]:
            time.sleep(case["pause_s"])  # stands for the time that a larger model takes
        if case.get("touch"):
            with torch.no_grad():
                net[0].weight.mul_(0.999)
    return job.step


steps = by_hand() if case.get("plain") else by_job()
if "STRETTO_FOLDER" in os.environ:
    flat = torch.cat([t.detach().reshape(-1) for t in net.state_dict().values()])
    name = os.environ.get("STRETTO_WORKER", "alone")
    result = {"steps": steps, "last_epoch": 0, "weights": flat.tolist()}
    Path(os.environ["STRETTO_FOLDER"], f"{name}.result").write_text(json.dumps(result))
