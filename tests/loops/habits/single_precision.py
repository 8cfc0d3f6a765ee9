"""Convolutions in float32 with frozen BatchNorm: a pretrained body in evaluation mode under a head that learns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import Dataset

from stretto.torch import Job

TOLERANCE = 1e-4


class Pictures(Dataset[dict[str, Tensor]]):
    """Samples as dictionaries, as many image sets have them."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = x[index].float()
        return {"image": torch.outer(row, row).unsqueeze(0), "label": y[index]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        )
        self.head = nn.Linear(8, 3)
        self.body[1].running_mean.fill_(0.1)  # type: ignore[union-attr, operator]
        self.body[1].running_var.fill_(2.0)  # type: ignore[union-attr, operator]

    def train(self, mode: bool = True) -> Model:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(image).mean((2, 3))), label)


def plain() -> dict[str, Tensor]:
    model, data = Model().train(), Pictures()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for batch in order():
        samples = [data[index] for index in batch]
        optimizer.zero_grad()
        model(*(torch.stack([one[key] for one in samples]) for key in ("image", "label"))).backward()
        optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Model()).train()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for batch in job.batches(Pictures(), size=24, epochs=8):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    return tensors(model)
