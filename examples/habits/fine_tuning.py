"""A head on a frozen body; the body is thawed after thirty steps, with a smaller rate of its own.

python examples/habits/fine_tuning.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train, test = slice(0, 1500), slice(1500, None)

torch.manual_seed(0)
job = stretto.join()
body, head = nn.Sequential(nn.Linear(64, 48), nn.ReLU()), nn.Linear(48, 10)
model = job.model(nn.Sequential(body, head))  # All of it, frozen or not.
body.requires_grad_(False)
opt = job.optimizer(torch.optim.AdamW(head.parameters(), lr=0.01))
for batch in job.batches(TensorDataset(x[train], y[train]), size=100, epochs=4):
    if batch.step == 30 and not body[0].weight.requires_grad:
        body.requires_grad_(True)
        opt.add_param_group({"params": list(body.parameters()), "lr": 0.002})
    opt.zero_grad()
    F.cross_entropy(model(batch.x), batch.y).backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    opt.step()

with torch.no_grad():
    right = (model(x[test]).argmax(1) == y[test]).float().mean()
if job.leader:
    print(f"{job.step} steps, {len(opt.param_groups)} groups, accuracy {right:.2f}")
