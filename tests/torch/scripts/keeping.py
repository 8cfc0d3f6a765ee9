"""Saves its whole state to a file after a loop or in the middle of one, or begins with such a file."""

from __future__ import annotations

import outcome
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = {
    "save": "",
    "restore": "",
    "at": "after the first loop",
    "wide": False,
    "ballast": 0,
    "epochs": 2,
    **outcome.CASE,
}

job = stretto.join()
model = job.model(nn.Sequential(nn.Linear(6, 30), nn.Linear(30, 3)).double() if case["wide"] else outcome.net())
model.register_buffer("ballast", torch.zeros(case["ballast"]))  # makes writing take a while
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
if case["restore"]:
    job.restore(case["restore"])
for loop in range(3):
    for batch in job.batches(
        TensorDataset(outcome.x, outcome.y), size=24, epochs=case["epochs"], seed=loop, per_worker=12
    ):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if case["save"] and case["at"] == "in the second loop" and (loop, batch.step) == (1, 7):
            job.save(case["save"])
        scheduler.step()
        outcome.pause(job)
    if case["save"] and case["at"] == "after the first loop" and loop == 0:
        job.save(case["save"])
outcome.write(job, model.parameters(), rate=optimizer.param_groups[0]["lr"])
