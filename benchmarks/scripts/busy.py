"""A job that computes: a convolution that gains from more workers, a small network that does not, a small GPT.

    busy.py --steps 1500 --model convolution|small|gpt [--marks FILE]

On a GPU where there is one. `--marks` is told when the first and the last step were done.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import stretto.torch as stretto

WORDS, LENGTH = 256, 128


class Noise(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many samples as are asked for, made when they are read."""

    def __init__(self, count: int, shape: tuple[int, ...], classes: int) -> None:
        self._count, self._shape, self._classes = count, shape, classes
        self._pool = torch.randn(64, *shape)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool[index % 64], torch.tensor(index % self._classes)


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self._count, self._pool = count, torch.randint(0, WORDS, (64, LENGTH + 1))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._pool[index % 64]
        return row[:-1], row[1:]


class Gpt(nn.Module):
    def __init__(self, width: int = 384, layers: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits: torch.Tensor = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits.transpose(1, 2)


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "1500")))
    parser.add_argument("--model", choices=("convolution", "small", "gpt"), required=True)
    parser.add_argument("--marks", default=os.environ.get("MARKS", ""))
    parser.add_argument("--every-step", default=os.environ.get("EVERY_STEP", ""))
    options = parser.parse_args()
    torch.manual_seed(0)
    size = {"convolution": 64, "small": 64, "gpt": 32}[options.model]
    count = size * options.steps
    data: Dataset[tuple[torch.Tensor, torch.Tensor]] = Text(count)
    if options.model != "gpt":
        data = Noise(count, (3, 24, 24) if options.model == "convolution" else (64,), 10)
    made = {"convolution": convolution, "small": small, "gpt": Gpt}[options.model]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = stretto.join()
    model = job.model(made.to(device))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in job.batches(data, size=size, epochs=1, seed=0):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x.to(device)), batch.y.to(device)).backward()
        optimizer.step()
        if job.rank == 0 and options.marks and batch.step in (0, options.steps - 1):
            mark(options.marks, f"{time.monotonic()}")
        if job.rank == 0 and options.every_step:
            mark(options.every_step, f"{time.monotonic()} {job.size}")


def mark(path: str, line: str) -> None:
    with open(path, "a") as marks:
        marks.write(f"{line}\n")


if __name__ == "__main__":
    main()
