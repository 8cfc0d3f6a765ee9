"""A small training in float64, right or wrong in the way that its argument names."""

from __future__ import annotations

import sys
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto


def main(habit: str, epochs: int) -> None:
    if habit == "raises early":
        raise SystemExit("cannot open data.csv")
    torch.set_default_dtype(torch.float64)
    if habit != "random data":
        torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = (x.sum(1, keepdim=True) + 0.1 * torch.randn(96, 1)).tanh()
    if habit != "unseeded":
        torch.manual_seed(1)
    else:
        torch.seed()
    job = stretto.join()
    layers = [nn.Linear(6, 8), nn.Tanh(), *([nn.Dropout(0.5)] if habit == "dropout" else []), nn.Linear(8, 1)]
    model = job.model(nn.Sequential(*layers))
    kind = torch.optim.Adam if habit == "sum with adam" else torch.optim.SGD
    optimizer = job.optimizer(kind(model.parameters(), lr=0.05))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    if habit == "never trains":
        return
    calls, shadow = 0, [parameter.detach().clone() for parameter in model.parameters()]
    for _ in job.epochs(epochs):
        for batch in job.batches(TensorDataset(x, y), size=24, seed=0):
            loss = F.mse_loss(model(batch.x), batch.y)
            if habit.startswith("sum"):
                loss = F.mse_loss(model(batch.x), batch.y, reduction="sum") / 24
            elif habit == "rank":
                loss = loss * (1 + job.rank)
            elif habit == "counts" and job.size > 0:
                calls += 1
                optimizer.param_groups[0]["lr"] = 0.05 / calls
            elif habit == "raises" and job.step == 7:
                raise ValueError("no label 7")
            elif habit == "hangs" and job.step == 5:
                wait_for_ever()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if habit == "plateau":
                plateau.step(loss.item())
            if habit == "shadow":
                for slow, fast in zip(shadow, model.parameters(), strict=True):
                    slow.lerp_(fast.detach(), 0.1)
        with open("log.txt", "a") as log:
            log.write(f"{job.step}\n")


def wait_for_ever() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100)
