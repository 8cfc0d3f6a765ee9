"""An MLP on scikit-learn's handwritten digits: an ordinary loop that may be resized while it runs.

python examples/digits_mlp.py            alone, on this machine
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="samples of the global batch, whatever the workers")
    options = parser.parse_args()

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, test = slice(0, 1500), slice(1500, None)

    torch.manual_seed(0)
    job = stretto.join()
    model = job.model(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    for batch in job.batches(TensorDataset(x[train], y[train]), size=options.size, epochs=options.epochs, seed=0):
        loss = F.cross_entropy(model(batch.x), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.report(loss=loss)

    model.eval()
    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).float().mean()
    if job.rank == 0:
        print(f"{job.step} steps, {job.size} workers at the end, accuracy {right:.3f}")


if __name__ == "__main__":
    main()
