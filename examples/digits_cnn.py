"""A small CNN with BatchNorm on scikit-learn's digits: scheduler, clipping, data loaders, evaluation between loops.

python examples/digits_cnn.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="each a few epochs, then an evaluation")
    parser.add_argument("--readers", type=int, default=0, help="processes that read samples ahead")
    options = parser.parse_args()

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)

    torch.manual_seed(0)
    job = stretto.join()
    model = job.model(network())
    optimizer = job.optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.rounds * 3 * 12)
    for number in range(options.rounds):
        model.train()
        for batch in job.batches(
            TensorDataset(x[train], y[train]), size=128, epochs=3, seed=number, per_worker=64, workers=options.readers
        ):
            loss = F.cross_entropy(model(batch.x), batch.y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            job.report(loss=loss)
        model.eval()
        with torch.no_grad():
            right = (model(x[test]).argmax(1) == y[test]).float().mean()
        if job.rank == 0:
            print(f"round {number}: {job.step} steps, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
