"""A step of four batches, each in passes of at most 16 samples; the loss is a mean over tokens.

python examples/habits/accumulation.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

torch.manual_seed(0)
words = torch.randint(1, 50, (512, 12))
lengths = torch.randint(3, 13, (512,))
words[torch.arange(12) >= lengths[:, None]] = 0  # 0 is no token.

job = stretto.join()
model = job.model(nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)))
opt = job.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
for batch in job.batches(
    TensorDataset(words[:, :-1], words[:, 1:]),
    size=64,
    epochs=8,
    accumulate=4,
    per_worker=16,
    weight=lambda batch: (batch.y != 0).sum(),
):
    logits = model(batch.x)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.y.flatten(), ignore_index=0)
    (loss / 4).backward()
    opt.step()  # It counts in the last pass of the step,
    if batch.last:
        opt.zero_grad()  # after which the next sum begins.

if job.leader:
    print(f"{job.step} steps, weights of length {model[1].weight.norm():.3f}")
