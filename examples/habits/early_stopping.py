"""Training ends when the loss has not fallen for three epochs.

python examples/habits/early_stopping.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)


class Patience:
    def __init__(self, epochs: int) -> None:
        self.epochs, self.best, self.since = epochs, float("inf"), 0

    def ends(self, loss: float) -> bool:
        self.best, self.since = (loss, 0) if loss < self.best else (self.best, self.since + 1)
        return self.since >= self.epochs

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.since = state["best"], state["since"]


torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9))
patience = job.keep("patience", Patience(3))
for epoch in job.epochs(100):
    for batch in job.batches(TensorDataset(x[train], y[train]), size=100, seed=epoch):
        opt.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        opt.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x[test]), y[test]).item()
    if patience.ends(loss):  # The same on all workers: all leave.
        break

if job.leader:
    print(f"ended after {epoch + 1} epochs, the best loss is {patience.best:.3f}")
