"""After training the result is saved with `torch.save`, by all workers or by the leader; the others take their time."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

folder = Path(os.environ["STRETTO_FOLDER"])
job = stretto.join()
model = job.model(outcome.net())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24):
    optimizer.zero_grad()
    F.cross_entropy(model(batch.x), batch.y).backward()
    optimizer.step()


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.01)


class Slow:
    """Stands for what is large."""

    def __reduce__(self) -> Any:
        if not leads:
            (folder / "writing").touch()
            wait_for("go")
        return OrderedDict, ()


leads = job.leader
if not leads:
    wait_for("saved")
if leads or outcome.CASE["by"] == "all":
    torch.save({"model": model.state_dict(), "slow": Slow()}, folder / "model.pt")
(folder / "saved").touch()
if not leads:
    (folder / "writing").touch()
