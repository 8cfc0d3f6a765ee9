"""The model of `elastic_resize.py` under torchft: one replica group of one process; notes each commit.

torchft's wrapper of the optimizer, its Gloo group, and the quorum under way during the forward pass, as its manual
shows. Its wrapper of DDP (0.2.0) ends the process on a failed assertion when a peer dies in a collective over Gloo, so
the gradients are reduced by the manager itself. Every replica starts from the same seed: nothing is fetched at first.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport

torch.set_num_threads(1)
torch.manual_seed(0)
width, layers = int(os.environ["WIDTH"]), int(os.environ["LAYERS"])
# A survivor that waits for another survivor, who has given up, notices by this time-out only.
collective = timedelta(seconds=float(os.environ["COLLECTIVE_S"]))
long = timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
network = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
plain = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9)


def load(state: dict[str, dict[str, object]]) -> None:
    network.load_state_dict(state["model"])
    plain.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=collective),
    load_state_dict=load,
    state_dict=lambda: {"model": network.state_dict(), "optimizer": plain.state_dict()},
    min_replica_size=2,
    timeout=collective,
    quorum_timeout=long,
    checkpoint_transport=HTTPTransport(timeout=long, num_chunks=0),
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=os.environ["LIGHTHOUSE"],
    replica_id=f"replica-{os.getpid()}",
    hostname="127.0.0.1",
    init_sync=False,
)
optimizer = Optimizer(manager, plain)
data = torch.randn(12 // 3, width)
with Path(os.environ["FOLDER"], f"{os.getpid()}.steps").open("w", buffering=1) as notes:
    while True:
        optimizer.zero_grad()
        done = manager.current_step()
        network(data).square().mean().backward()
        for work in [manager.allreduce(p.grad) for p in network.parameters()]:
            work.wait()
        optimizer.step()
        if manager.current_step() > done:
            notes.write(f"{time.monotonic()} {done} {manager.num_participants()} {os.getpid()}\n")
