"""Random augmentation of dictionaries, read by other processes, collated by hand, the last left out; OneCycleLR."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import outcome
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import stretto.torch as stretto


class Noisy(Dataset[dict[str, Any]]):
    """Every kind of generator that people use."""

    def __len__(self) -> int:
        return 250

    def __getitem__(self, index: int) -> dict[str, Any]:
        place = index % len(outcome.x)
        noise = torch.randn(6, dtype=torch.float64) + np.random.randn(6) + random.gauss(0.0, 1.0)
        return {"x": outcome.x[place] + 0.3 * noise, "y": outcome.y[place], "name": f"sample {index}"}


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "x": torch.stack([sample["x"] for sample in samples]),
        "y": torch.stack([sample["y"] for sample in samples]),
        "names": [sample["name"] for sample in samples],
    }


job = stretto.join()
model = job.model(outcome.net())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=60)
job.optimizer(optimizer)  # in this order, too
for batch in job.batches(
    Noisy(),
    size=24,
    epochs=6,
    seed=3,
    workers=outcome.CASE["workers"],
    pin_memory=True,
    collate=collate,
    drop_last=True,
):
    given: Tensor = batch["x"]
    assert batch["names"] == [f"sample {index}" for index in batch.indices]
    loss = F.cross_entropy(model(given), batch["y"])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    job.report(loss=loss)
    outcome.pause(job)
outcome.write(job, model.state_dict().values(), rate=optimizer.param_groups[0]["lr"], at=scheduler.last_epoch)
