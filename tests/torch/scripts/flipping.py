"""After the last step one bit of what the worker of rank 1 holds is another; `CASE` says of what."""

from __future__ import annotations

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

job = stretto.join()
net = outcome.net()
net.register_buffer("seen", torch.zeros(2))
model = job.model(net)
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[0] ^= 1


def flip_of(kind: str) -> None:
    state = optimizer.state[model[0].weight]
    if kind == "learning rate":
        rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
        flip(rate)
        optimizer.param_groups[0]["lr"] = float(rate)
    elif kind == "scheduler":
        scheduler.last_epoch ^= 1
    else:
        found = {
            "parameter": model[0].weight, "moment": state["exp_avg"], "counter": state["step"], "buffer": model.seen,
        }  # fmt: skip
        flip(found[kind])


for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, epochs=2):
    optimizer.zero_grad()
    F.cross_entropy(model(batch.x), batch.y).backward()
    optimizer.step()
    scheduler.step()
    if batch.step == 19 and job.rank == 1:
        flip_of(outcome.CASE["kind"])
