"""The usual shape: a loop for each epoch; scheduler and evaluation between them; best result and average kept."""

from __future__ import annotations

from typing import Any

import outcome
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import stretto.torch as stretto


class Net(nn.Module):
    """With tied weights, and buffers of both kinds that its passes change."""

    passes: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.total += 1
        hidden: Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(given)))))
        return hidden


class Best:
    """What evaluation found."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])


job = stretto.join()
model = job.model(Net().double())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.5)
average = job.keep("average", AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
best = job.keep("best", Best())
for epoch in job.epochs(8) if outcome.CASE.get("told") else range(8):
    model.train()
    for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, seed=epoch):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outcome.pause(job)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        best.losses.append(round(float(F.cross_entropy(model(outcome.x), outcome.y)), 9))
outcome.write(
    job,
    [*model.parameters(), *average.module.parameters()],
    rate=optimizer.param_groups[0]["lr"],
    at=scheduler.last_epoch,
    averaged=int(average.n_averaged),
    passes=[int(model.passes), float(model.total)],
    losses=best.losses,
)
