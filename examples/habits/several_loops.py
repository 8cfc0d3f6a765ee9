"""Two loops in each epoch, on different data, and one at the end.

python examples/habits/several_loops.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
clean, noisy, last = TensorDataset(x[:500], y[:500]), TensorDataset(x[500:1400], y[500:1400]), slice(1400, 1500)

torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10))
opt = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))


def learn(given: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    opt.zero_grad()
    (share * F.cross_entropy(model(given), wanted)).backward()
    opt.step()


for epoch in job.epochs(3):
    for batch in job.batches(clean, size=100, seed=epoch):
        learn(batch.x, batch.y, 1.0)
    if epoch > 0:  # By what all workers know alike.
        for batch in job.batches(noisy, size=100, seed=epoch):
            learn(batch.x, batch.y, 0.5)
for batch in job.batches(TensorDataset(x[last], y[last]), size=50):
    learn(batch.x, batch.y, 1.0)

if job.leader:
    print(f"{job.step} steps, weights of length {model.weight.norm():.3f}")
