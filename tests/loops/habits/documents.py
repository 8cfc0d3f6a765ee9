"""Truncated backpropagation: a batch is some whole documents, read in chunks with a hidden state that goes on from
chunk to chunk, and a step for each of them. The worker dies in the third."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import order, tensors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

DIES_IN = 3
documents = torch.randint(0, 9, (240, 13), generator=torch.Generator().manual_seed(12))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words, self.lstm, self.out = nn.Embedding(9, 6), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 9)


def read(model: Reader, optimizer: torch.optim.Optimizer, whole: Tensor) -> None:
    hidden: tuple[Tensor, Tensor] | None = None
    for at in range(0, 12, 4):
        found, hidden = model.lstm(model.words(whole[:, at : at + 4]), hidden)
        assert hidden is not None
        hidden = (hidden[0].detach(), hidden[1].detach())
        loss = F.cross_entropy(model.out(found).flatten(0, 1), whole[:, at + 1 : at + 5].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()


def plain() -> dict[str, Tensor]:
    model = Reader().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in order(size=24, epochs=7):
        read(model, optimizer, documents[batch])
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Reader().double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    for (whole,) in job.batches(TensorDataset(documents), size=24, epochs=7):
        read(model, optimizer, whole)
    return tensors(model)
