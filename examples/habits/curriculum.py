"""Short samples first: each epoch a sampler gives more of them, and batches are cut by length.

python examples/habits/curriculum.py
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import stretto.torch as stretto

SIZE = 32


class Sentences(Dataset):
    """Of 2 to 20 words; is the sum of the words even?"""

    def __init__(self) -> None:
        given = torch.Generator().manual_seed(0)
        lengths = torch.randint(2, 21, (640,), generator=given)
        self.texts = [torch.randint(0, 10, (int(length),), generator=given) for length in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.texts[index], self.texts[index].sum() % 2


class Easy:
    """Global batches of samples of about the same length; in the first epochs the shorter half only."""

    def __init__(self, lengths: list[int]) -> None:
        self.by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        some = self.by_length[: len(self.by_length) // 2] if self.epoch < 2 else self.by_length
        batches = [some[i : i + SIZE] for i in range(0, len(some), SIZE)]
        for i in torch.randperm(len(batches)).tolist():  # Alike on all workers: by (seed, epoch).
            yield batches[i]


def pad(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts, answers = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=10), torch.stack(answers)


torch.manual_seed(0)
job = stretto.join()
data = Sentences()
model = job.model(nn.Sequential(nn.EmbeddingBag(11, 16, mode="sum", padding_idx=10), nn.Linear(16, 2)))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
for batch in job.batches(data, epochs=4, batch_sampler=Easy([len(text) for text in data.texts]), collate=pad):
    opt.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    opt.step()

if job.leader:
    print(f"{job.step} steps, weights of length {model[1].weight.norm():.3f}")
