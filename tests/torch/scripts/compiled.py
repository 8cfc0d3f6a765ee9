"""A model that is compiled before it is registered, and one after."""

from __future__ import annotations

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

job = stretto.join()
plain = [outcome.net() for _ in range(2)]
first = job.model(torch.compile(plain[0], backend="aot_eager"))
second = torch.compile(job.model(plain[1]), backend="aot_eager")
optimizer = job.optimizer(torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01))
for batch in job.batches(TensorDataset(outcome.x, outcome.y), size=24, epochs=20):
    loss = F.cross_entropy(first(batch.x) + second(batch.x), batch.y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    outcome.pause(job)
outcome.write(job, [tensor for net in plain for tensor in net.state_dict().values()])
