"""An evaluation after each epoch, and a shorter one every twenty steps.

python examples/habits/evaluation.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def accuracy(rows: slice) -> float:
    model.eval()
    with torch.no_grad():
        found = (model(x[rows]).argmax(1) == y[rows]).float().mean().item()
    model.train()
    return found


def tell(step: int) -> None:
    print(f"step {step}: accuracy {accuracy(slice(1500, 1600)):.2f} on a part")


for epoch in job.epochs(4):
    for batch in job.batches(TensorDataset(x[train], y[train]), size=125, seed=epoch, per_worker=32):
        loss = F.cross_entropy(model(batch.x), batch.y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if job.every(20):
            job.once_by_leader(tell, job.step)
    whole = accuracy(test)  # Every worker, with the same result.
    if job.leader:
        print(f"epoch {epoch}: accuracy {whole:.2f}")
