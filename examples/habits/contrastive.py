"""A loss that compares every sample of the global batch with every other one."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

x = torch.tensor(load_digits().data, dtype=torch.float64) / 16

torch.manual_seed(0)
job = stretto.join()
layers = [torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 16)]
encoder = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(*layers).double())
encoder = job.model(encoder)
opt = job.optimizer(torch.optim.Adam(encoder.parameters(), lr=0.003))


def view(rows: torch.Tensor) -> torch.Tensor:
    noise = job.noise(64, dtype=torch.float64)  # by sample: the same at any number of workers
    return rows + 0.1 * noise


for batch in job.batches(TensorDataset(x), size=128, epochs=3):
    (rows,) = batch
    one = job.all_gather(F.normalize(encoder(view(rows))))
    other = job.all_gather(F.normalize(encoder(rows)))
    logits = one @ other.T / 0.1
    loss = F.cross_entropy(logits, torch.arange(len(logits)))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if job.every(10):
        job.once_by_leader(print, f"step {job.step}: loss {loss.item():.4f} over {len(logits)} pairs")
