"""Texts of different lengths: padded by a collate function, a packed GRU, a mean over tokens, buckets of like lengths
that are shuffled anew in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import tensors
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset

from stretto.torch import Job

EPOCHS = 6
chance = torch.Generator().manual_seed(9)
texts = [torch.randint(1, 12, (3 + i % 7,), generator=chance) for i in range(120)]


class Texts(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(texts)

    def __getitem__(self, index: int) -> Tensor:
        return texts[index]


class Buckets:
    """Batches of 10 of about the same length."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        chance = torch.Generator().manual_seed(100 + self.epoch)
        mixed = torch.randperm(len(texts), generator=chance).tolist()
        mixed.sort(key=lambda index: len(texts[index]))
        lists = [mixed[at : at + 10] for at in range(0, len(mixed), 10)]
        for place in torch.randperm(len(lists), generator=chance).tolist():
            yield lists[place]


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    given = pad_sequence([one[:-1] for one in samples], batch_first=True)
    goal = pad_sequence([one[1:] for one in samples], batch_first=True, padding_value=-100)
    return {"given": given, "goal": goal, "lengths": torch.tensor([len(one) - 1 for one in samples])}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.rnn, self.out = (
            nn.Embedding(12, 8, padding_idx=0),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 12),
        )

    def forward(self, given: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(given), lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.out(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])
        return found


def loss_of(model: Model, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["given"], batch["lengths"]).flatten(0, 1), batch["goal"].flatten())


def plain() -> dict[str, Tensor]:
    model, buckets = Model().double(), Buckets()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        buckets.set_epoch(epoch)
        for batch in buckets:
            optimizer.zero_grad()
            loss_of(model, pad([texts[index] for index in batch])).backward()
            optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Model().double())
    optimizer = job.optimizer(torch.optim.NAdam(model.parameters(), lr=0.01))
    for batch in job.batches(
        Texts(), epochs=EPOCHS, batch_sampler=Buckets(), collate=pad, weight=lambda batch: (batch["goal"] != -100).sum()
    ):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return tensors(model)
