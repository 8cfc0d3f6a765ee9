"""The best model so far: kept with the job, written to a file, and put back at the end.

python examples/habits/best.py
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)


class Best:
    """Registered with `job.keep`: newcomers and restarts know it, too."""

    def __init__(self) -> None:
        self.loss, self.weights = float("inf"), {}

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.weights = state["loss"], state["weights"]


torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9))
best = job.keep("best", Best())
for epoch in job.epochs(8):
    for batch in job.batches(TensorDataset(x[train], y[train]), size=100, seed=epoch):
        opt.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        opt.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x[test]), y[test]).item()
    if loss < best.loss:
        best.loss, best.weights = loss, copy.deepcopy(model.state_dict())
        job.save("best.safetensors")  # All call it, one writes.
    if job.leader:
        print(f"epoch {epoch}: loss {loss:.3f}, the best is {best.loss:.3f}")

model.load_state_dict(best.weights)
if job.leader:
    torch.save(model.state_dict(), "model.pt")
