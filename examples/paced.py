"""Training on devices of known speed: a worker takes so many milliseconds for every sample of its slice.

Gradients, reductions and resizes are real; only the forward pass is made to last, as if the model were larger. So the
job scales as it would on GPUs of its own, also where six workers share two cores and a small model would gain nothing
from them. Its data are made up: a worker on a third of a core takes seconds to load a library that has some.

python examples/paced.py --sample-ms 0.1
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

SIZE = 120
"""Samples of the global batch: as many for each of 1 to 6 workers."""
LATE_S = 0.25
"""What a device makes up for later: reductions, which go on beside the computing of larger models, and a busy core."""


class Device:
    """Takes so long for a sample, one slice after the other."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s, self._free_s = sample_s, time.monotonic()

    def compute(self, samples: int) -> None:
        """Return when it has done so many more."""
        self._free_s = max(self._free_s, time.monotonic() - LATE_S) + samples * self._sample_s
        time.sleep(max(0.0, self._free_s - time.monotonic()))


def clouds(each: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ten clouds of so many points, which overlap."""
    y = torch.arange(10).repeat(each)
    return torch.randn(10, 64)[y] + 2 * torch.randn(len(y), 64), y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5, help="each of 12 steps")
    parser.add_argument("--sample-ms", type=float, default=3.0, help="how long a worker's device takes for a sample")
    options = parser.parse_args()

    torch.manual_seed(0)
    x, y = clouds(180)
    train, test = slice(0, 12 * SIZE), slice(12 * SIZE, None)
    job = stretto.join()
    model = job.model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    device = Device(options.sample_ms / 1000)
    for batch in job.batches(TensorDataset(x[train], y[train]), size=SIZE, epochs=options.epochs, seed=0):
        device.compute(len(batch.x))
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.report(loss=loss)

    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).float().mean()
    if job.rank == 0:
        print(f"{job.step} steps, {job.size} workers at the end, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
