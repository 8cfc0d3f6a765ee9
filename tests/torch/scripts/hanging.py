"""Trains, and at some place one of its workers loops for ever, or does so until a file is there.

The place: in the body of a step, between two loops, or after the last.
"""

from __future__ import annotations

import os
import time

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = {"place": "", "step": 6, "who": "w1", "pause_s": 0.02, "loops": 1, "breaks": False, **outcome.CASE}
job = stretto.join()
model = job.model(outcome.net())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))


def stands_still(place: str) -> None:
    while case["place"] == place and os.environ["STRETTO_WORKER"] == case["who"]:
        time.sleep(0.01)
        if os.path.exists(os.path.join(os.environ["STRETTO_FOLDER"], "go")):
            return


def train(loop: int) -> None:
    for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, seed=1):
        loss = F.cross_entropy(model(batch.x), batch.y)
        if batch.step == case["step"] and loop == 0:
            stands_still("body")
            if case["breaks"]:
                break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(case["pause_s"])


for loop in range(case["loops"]):
    train(loop)
    stands_still("between" if loop + 1 < case["loops"] else "after")
