"""ResNet-20 on CIFAR-10, or on random images of its shape when no folder with the real ones is given.

python examples/resnet20_cifar.py [--data cifar-10-batches-py] [--steps 20]
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import stretto.torch as stretto


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.stride, self.more = stride, outside - inside

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        # The shortcut without parameters: every other pixel, new channels empty.
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + short)


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    inside = 16
    for outside in (16, 32, 64):
        for number in range(3):
            layers.append(Block(inside, outside, 2 if outside > 16 and number == 0 else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random crops and mirror images: the same for an image and epoch, whichever worker reads it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = F.pad(self.x[index], (4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.y[index]


def dataset(folder: Path | None) -> Dataset[tuple[Tensor, ...]]:
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2048, 3, 32, 32, generator=generator)
        return TensorDataset(x, torch.randint(0, 10, (2048,), generator=generator))
    images, labels = [], []
    for number in range(1, 6):
        with (folder / f"data_batch_{number}").open("rb") as file:
            part = pickle.load(file, encoding="bytes")
        images.append(torch.tensor(part[b"data"]).reshape(-1, 3, 32, 32))
        labels += part[b"labels"]
    return Augmented(torch.cat(images).float() / 255, torch.tensor(labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's python batches")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()

    torch.manual_seed(0)
    job = stretto.join()
    model = job.model(resnet20())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4))
    for batch in job.batches(dataset(options.data), size=64, epochs=200, seed=0, per_worker=32):
        loss = F.cross_entropy(model(batch.x.to(job.device)), batch.y.to(job.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.report(loss=loss)
        if job.step + 2 >= options.steps:
            job.stop()  # takes effect after the next step, on all workers
    if job.rank == 0:
        print(f"{job.step} steps, last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
