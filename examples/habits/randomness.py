"""Random numbers: in the dataset, by sample, for a decision of all, and in dropout.

python examples/habits/randomness.py
"""

import random

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)


class Shifted(Dataset):
    """Augmentation: seeded by (seed, epoch, index), whoever reads the sample."""

    def __len__(self) -> int:
        return 1500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return x[index].roll(random.randint(-1, 1), dims=1).flatten(), y[index]


torch.manual_seed(0)
job = stretto.join()
model = job.model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.003))
for batch in job.batches(Shifted(), size=100, epochs=6, seed=3):
    given = batch.x + 0.05 * job.noise(64)  # A row for each sample: the same at any number of workers.
    if random.random() < 0.5:  # A coin: alike on all workers.
        given = given.clamp(0, 1)
    loss = F.cross_entropy(model(given), batch.y)  # Dropout: another mask in every slice.
    opt.zero_grad()
    loss.backward()
    opt.step()

model.eval()
with torch.no_grad():
    right = (model(x[1500:].flatten(1)).argmax(1) == y[1500:]).float().mean()
if job.leader:
    print(f"{job.step} steps, accuracy {right:.1f}")
