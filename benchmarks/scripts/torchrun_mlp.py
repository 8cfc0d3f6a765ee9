"""The model of `elastic_resize.py` as a plain DDP script for torchrun: checkpoints itself, resumes after a restart."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)
width, layers = int(os.environ["WIDTH"]), int(os.environ["LAYERS"])
folder = Path(os.environ["FOLDER"])
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
saved = folder / "state.pt"
step = 0
if saved.exists():
    state = torch.load(saved)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
rank, size = dist.get_rank(), dist.get_world_size()
data = torch.randn(12, width)
with (folder / f"{os.getpid()}.steps").open("w", buffering=1) as notes:
    while True:
        notes.write(f"{time.monotonic()} {step} {size} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
        loss = model(data[rank::size]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % 10 == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
