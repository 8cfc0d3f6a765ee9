"""Scripts that cannot be trained, or that end in ways of their own; on all workers, or on the second only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import stretto.torch as stretto

trouble = outcome.CASE["trouble"]
second = outcome.WORKER == "w1"


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(outcome.x, outcome.y, strict=True)


class SizedStream(Stream):
    def __len__(self) -> int:
        return 240


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        if index == 33:
            if trouble == "reader dies":
                os._exit(9)
            raise KeyError("sample 33 is broken")
        return outcome.x[index], outcome.y[index]


pairs = TensorDataset(outcome.x, outcome.y)
datasets: dict[str, Any] = {
    "stream": Stream(),
    "sized stream": SizedStream(),
    "loader": DataLoader(pairs, batch_size=8),
    "loader of a stream": DataLoader(Stream(), batch_size=24),
    "empty": TensorDataset(outcome.x[:0], outcome.y[:0]),
    "short": TensorDataset(outcome.x[:10], outcome.y[:10]),
    "too short": TensorDataset(outcome.x[:10], outcome.y[:10]),
    "reader raises": Broken(),
    "reader dies": Broken(),
}
options: dict[str, Any] = {
    "no epochs": {"epochs": 0},
    "too short": {"drop_last": True},
    "reader raises": {"workers": 2},
    "reader dies": {"workers": 2},
}
job = stretto.join()
lazy = nn.Sequential(nn.LazyLinear(24), nn.Tanh(), nn.LazyLinear(3)).double()
model: nn.Sequential = job.model(lazy if trouble == "lazy" else outcome.net())
scale = nn.Parameter(torch.ones((), dtype=torch.float64))
others = {"lazy": [scale], "stray": [*model.parameters(), scale]}
optimizer = job.optimizer(torch.optim.SGD(others.get(trouble) or model.parameters(), lr=0.1))
for batch in job.batches(datasets.get(trouble, pairs), **{"size": 24, "epochs": 5, **options.get(trouble, {})}):
    if job.step == 20:
        if trouble == "exit 0":
            sys.exit(0)
        if trouble == "exit 3 of one" and second:
            sys.exit(3)
        if trouble == "interrupt" and second:
            raise KeyboardInterrupt
    loss = F.cross_entropy(model(batch.x) * scale, batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outcome.pause(job)
outcome.write(job, model.state_dict().values())
