"""What real scripts have: two optimizers, groups, tied, frozen and unused parameters, a scaler, extra state."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = json.loads(os.environ["CASE"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 12)
        self.decode = nn.Linear(12, 6, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().clone())
        self.tied = nn.Linear(6, 12, bias=False)
        self.tied.weight = self.encode.weight
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        h = torch.tanh(self.encode(x) + self.tied(x))
        h = self.frozen(h)
        if more:
            h = h + self.sometimes(h)
        return self.decode(h)


class Counter:
    """Extra state that every body changes."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


torch.manual_seed(3)
generator = torch.Generator().manual_seed(1)
x = torch.randn(case["samples"], 6, generator=generator, dtype=torch.float64)
job = stretto.join()
net = job.model(Net().double())
judge = job.model(nn.Linear(6, 1).double())
first = job.optimizer(
    torch.optim.AdamW(
        [
            {"params": [net.encode.weight, net.encode.bias]},
            {"params": [*net.decode.parameters(), *net.sometimes.parameters()], "lr": 1e-3},
        ],
        lr=3e-3,
    )
)
second = job.optimizer(torch.optim.SGD(judge.parameters(), lr=0.01, momentum=0.5))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(first, patience=5)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10)
counter = job.keep("counter", Counter())
for batch in job.batches(TensorDataset(x), size=case["size"], epochs=case["epochs"], seed=2):
    counter.seen += 1
    given = batch.x
    judged = judge(net(given, job.step % 3 == 0).detach()).square().mean()
    second.zero_grad()
    judged.backward()
    second.step()
    loss = (net(given, job.step % 3 == 0) - given).square().mean() + 0.01 * judge(net(given, False)).mean()
    first.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(first)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(first)
    scaler.update()
    plateau.step(1.0 / (1 + job.step))
    job.report(loss=loss)
    if case["pause_s"]:
        time.sleep(case["pause_s"])  # stands for the time that a larger model takes

if "STRETTO_FOLDER" in os.environ:
    tensors = [*net.state_dict().values(), *judge.state_dict().values()]
    flat = torch.cat([t.detach().double().reshape(-1) for t in tensors])
    name = os.environ.get("STRETTO_WORKER", "alone")
    result = {"steps": job.step, "last_epoch": counter.seen, "weights": [*flat.tolist(), scaler.get_scale()]}
    Path(os.environ["STRETTO_FOLDER"], f"{name}.result").write_text(json.dumps(result))
