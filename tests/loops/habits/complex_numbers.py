"""Parameters that are complex, beside real ones: filters in the space of frequencies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.factors = nn.Parameter(torch.randn(8, 4, dtype=torch.complex128))
        self.head = nn.Linear(48, 3).double()

    def forward(self, given: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(given)[:, None, :] * self.factors
        found: Tensor = self.head(torch.fft.irfft(spectrum, n=6).flatten(1).tanh())
        return found


def plain() -> dict[str, Tensor]:
    model = Filter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in order():
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return {name: torch.view_as_real(one) if one.is_complex() else one for name, one in tensors(model).items()}


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Filter())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=10):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    return {name: torch.view_as_real(one) if one.is_complex() else one for name, one in tensors(model).items()}
