"""One curve in TensorBoard, whoever writes it: through resizes, the death of the leader, and restores.

python examples/habits/tensorboard_curve.py --folder runs/digits    # then: tensorboard --logdir runs
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import stretto.torch as stretto

options = argparse.ArgumentParser()
options.add_argument("--folder", default="runs/digits")
folder = options.parse_args().folder

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def open_writer() -> None:
    global writer
    writer = SummaryWriter(folder, purge_step=job.step)


def log(step: int, loss: float) -> None:
    writer.add_scalar("loss/train", loss, step)
    with torch.no_grad():
        writer.add_scalar("loss/test", F.cross_entropy(model(x[test]), y[test]), step)
    writer.flush()


job.on_leader(open_writer)
for batch in job.batches(TensorDataset(x[train], y[train]), size=100, epochs=5, per_worker=50):
    loss = F.cross_entropy(model(batch.x), batch.y)
    whole = job.all_reduce(loss.item(), "mean")  # In the last pass that of the global batch.
    opt.zero_grad()
    loss.backward()
    opt.step()
    if job.every(5):
        job.once_by_leader(log, job.step, whole)
