"""Figures of the global batch, an evaluation that the workers share, and a decision that they all take alike."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float64) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
scheduler = ReduceLROnPlateau(opt, patience=0)


def loss_of_a_part() -> torch.Tensor:
    """The sum over every so many samples: this worker's share of the test data."""
    with torch.no_grad():
        own = slice(test.start + job.rank, None, job.size)
        return F.cross_entropy(model(x[own]), y[own], reduction="sum")


for epoch in job.epochs(6):
    for batch in job.batches(TensorDataset(x[train], y[train]), size=150, seed=epoch):
        found = model(batch.x)
        loss = F.cross_entropy(found, batch.y)
        whole = job.all_reduce({"loss": loss.item(), "right": (found.argmax(1) == batch.y).double().mean()}, "mean")
        opt.zero_grad()
        loss.backward()
        opt.step()
        if job.every(20):
            job.once_by_leader(print, f"step {job.step}: loss {whole['loss']:.4f}, {whole['right']:.1%} are right")
    total = job.all_reduce(loss_of_a_part) / len(y[test])
    scheduler.step(total)
    if job.leader:
        print(f"epoch {epoch}: loss {total:.4f}, next learning rate {opt.param_groups[0]['lr']}")
