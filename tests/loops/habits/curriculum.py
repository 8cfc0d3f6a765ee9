"""A curriculum: easy samples first, more of them in every epoch; weights for what is rare, drawn with replacement by
torch's own sampler, later; the loaders are made anew."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from stretto.runtime.order import order_seed
from stretto.torch import Job
from stretto.torch.seeding import seed_all

EPOCHS = 8
by_difficulty = x.norm(dim=1).argsort().tolist()
rarity = (1.0 / torch.bincount(y).double())[y]


def easy(epoch: int) -> list[int]:
    return by_difficulty[: 120 + 40 * epoch]


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(EPOCHS):
        if epoch < 4:
            known = easy(epoch)
            batches = [[known[i] for i in one] for one in order(size=20, epochs=1, seed=epoch, samples=len(known))]
        else:
            seed_all(order_seed(epoch, 0))
            drawn = list(WeightedRandomSampler(rarity, 200))
            batches = [drawn[at : at + 20] for at in range(0, 200, 20)]
        for batch in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return tensors(model)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adagrad(model.parameters(), lr=0.05))
    data = TensorDataset(x, y)
    for epoch in job.epochs(EPOCHS):
        if epoch < 4:
            loader = DataLoader(Subset(data, easy(epoch)), batch_size=20, shuffle=True)
        else:
            loader = DataLoader(data, batch_size=20, sampler=WeightedRandomSampler(rarity, 200))
        for given, goal in job.batches(loader, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(given), goal).backward()
            optimizer.step()
    return tensors(model)
