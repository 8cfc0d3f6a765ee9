"""Several updates on one batch by one optimizer: three of them, or only one in the first steps (`from`). The worker of
rank 1 dies once, in step `dies`[0], in the sum of the update `dies`[1]."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.torch.groups import Group

case = json.loads(os.environ["CASE"])
folder = Path(os.environ["STRETTO_FOLDER"])
update = 0
torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
x = torch.randn(240, 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (240,), generator=generator)


def deadly(call: Any) -> Any:
    def wrapped(self: Group, tensor: torch.Tensor) -> Any:
        if [job.step, update] == case["dies"] and job.rank == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, tensor)

    return wrapped


Group.all_reduce = deadly(Group.all_reduce)  # type: ignore[method-assign]
job = stretto.join()
net = job.model(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double())
optimizer = job.optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
for batch in job.batches(TensorDataset(x, y), size=24, epochs=6):
    for number in range(1, 4 if batch.step >= case["from"] else 2):
        update = number
        loss = F.cross_entropy(net(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if "STRETTO_FOLDER" in os.environ:
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    name = os.environ.get("STRETTO_WORKER", "alone")
    Path(folder, f"{name}.result").write_text(
        json.dumps({"steps": job.step, "last_epoch": 0, "weights": flat.tolist()})
    )
