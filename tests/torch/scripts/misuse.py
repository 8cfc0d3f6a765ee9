"""What scripts do wrong, on one of two workers or on both."""

from __future__ import annotations

import json
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

misuse = json.loads(os.environ["CASE"])["misuse"]
second = os.environ["STRETTO_WORKER"] == "w1"

torch.manual_seed(0)
samples = 64 if misuse == "dataset" and second else 60
data = TensorDataset(torch.randn(samples, 4), torch.randn(samples, 1))
job = stretto.join()
model = job.model(nn.Linear(4, 2 if misuse == "model" and second else 1))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if misuse == "second loop":
    for batch in job.batches(data, size=12):
        model(batch.x).mean().backward()
    data = TensorDataset(*(part[: 59 if second else 60] for part in data.tensors))
if misuse == "short":
    data = TensorDataset(*(part[:7] for part in data.tensors))
for batch in job.batches(data, size=12, epochs=400):
    if job.step == 5:
        if misuse == "raise" and second:
            raise ValueError("the script is wrong")
        if misuse == "break" and second:
            break
    loss = (model(batch.x) - batch.y).square().mean()
    if job.step == 5 and misuse == "nan":
        loss = loss * float("nan")
    if job.step == 5 and misuse == "skip" and second:
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.report(loss=loss)
