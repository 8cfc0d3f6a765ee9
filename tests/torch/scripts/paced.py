"""Steps that take a known time, and notes of how long they really took; evaluations and saves in between."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import stretto.torch as stretto

CASE = json.loads(os.environ["CASE"])
folder = Path(os.environ["STRETTO_FOLDER"])
x = torch.randn(64, 4)
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
with open(folder / f"{os.environ['STRETTO_WORKER']}.steps", "w") as notes:
    for _ in job.epochs(1000):
        last_s, generation, plain = 0.0, -1, False
        for batch in job.batches(TensorDataset(x, x.sum(1, keepdim=True)), size=16, per_worker=8, epochs=10):
            if job.gate.last:
                now_s = time.monotonic()
                if plain and generation == job.generation:
                    notes.write(json.dumps([generation, now_s - last_s]) + "\n")
                last_s, generation, plain = now_s, job.generation, job.step % 20 != 0
                if not plain:
                    time.sleep(CASE["evaluation_s"])
                elif job.step % 20 == 10:
                    job.save(folder / "saved")
                if (folder / "enough").exists():
                    job.stop()
                time.sleep(CASE["step_s"] / job.size)
            ((model(batch[0]) - batch[1]) ** 2).mean().backward()
            opt.step()
            opt.zero_grad()
        if (folder / "enough").exists():
            break
        time.sleep(CASE["evaluation_s"])
