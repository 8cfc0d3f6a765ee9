"""A script that changes its parameters by hand in the loop's body, before the step: decay as some write it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = json.loads(os.environ["CASE"])
torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
x = torch.randn(case["samples"], 6, generator=generator, dtype=torch.float64)
job = stretto.join()
net = job.model(nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 6)).double())
# So that a transfer takes longer than the way to the first change.
net.register_parameter("ballast", nn.Parameter(torch.ones(4_000_000, dtype=torch.float64), requires_grad=False))
optimizer = job.optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
for batch in job.batches(TensorDataset(x), size=case["size"], epochs=case["epochs"], seed=0):
    for parameter in net.parameters():
        if case["touch"] == "counted":
            with torch.no_grad():
                parameter.mul_(0.999)
        else:
            parameter.data.mul_(0.999)
    loss = (net(batch.x) - batch.x.sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.report(loss=loss)
    if case["pause_s"]:
        time.sleep(case["pause_s"])  # stands for the time that a larger model takes

if "STRETTO_FOLDER" in os.environ:
    flat = torch.cat([t.detach().reshape(-1) for t in net.state_dict().values() if t.numel() < 1000])
    name = os.environ.get("STRETTO_WORKER", "alone")
    result = {"steps": job.step, "last_epoch": 0, "weights": flat.tolist()}
    Path(os.environ["STRETTO_FOLDER"], f"{name}.result").write_text(json.dumps(result))
