"""Loops that train other parameters: some thawed and put into a group of their own, some frozen, a layer added."""

from __future__ import annotations

import outcome
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

job = stretto.join()
model = job.model(outcome.net())
model[0].requires_grad_(False)
optimizer = job.optimizer(torch.optim.Adam(model[2].parameters(), lr=0.01))
for stage in range(3):
    for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, epochs=3 if stage < 2 else 10, seed=stage):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outcome.pause(job)
    if stage == 0:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.002})
    if stage == 1:
        model[2].bias.requires_grad_(False)
        if outcome.CASE["layer"]:
            model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.02})
outcome.write(job, model.state_dict().values())
