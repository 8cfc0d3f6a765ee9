"""A small training whose result does not depend on how many workers did it; options are in the variable CASE."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = {"samples": 240, "size": 24, "epochs": 8, "per_worker": None, "pause_s": 0.0, "loops": 1, "workers": 0}
case |= json.loads(os.environ.get("CASE", "{}"))

torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
x = torch.randn(case["samples"], 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (case["samples"],), generator=generator)

job = stretto.join(consistency="bitwise" if case.get("bitwise") else None, virtual_ranks=8)
if case.get("bitwise"):
    net: nn.Module = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
    x = x.float()
else:
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double()
model = job.model(net)
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
for loop in range(case["loops"]):
    for batch in job.batches(
        TensorDataset(x, y),
        size=case["size"],
        epochs=case["epochs"],
        seed=loop,
        per_worker=case["per_worker"],
        workers=case["workers"],
    ):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        job.report(loss=loss)
        if case["pause_s"]:
            time.sleep(case["pause_s"])  # stands for the time that a larger model takes

if "STRETTO_FOLDER" in os.environ:
    state = [t.detach().double().reshape(-1) for t in model.state_dict().values()]
    flat = torch.cat(state)
    name = os.environ.get("STRETTO_WORKER", "alone")
    result = {"steps": job.step, "last_epoch": scheduler.last_epoch, "weights": flat.tolist()}
    Path(os.environ["STRETTO_FOLDER"], f"{name}.result").write_text(json.dumps(result))
