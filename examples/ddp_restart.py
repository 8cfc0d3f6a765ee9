"""Plain DistributedDataParallel, with nothing of Stretto in it: resized by being stopped and started again.

It trains a small network on scikit-learn's digits, under torchrun or under Stretto's `restart` level. When it is told
to stop (SIGTERM) all ranks agree on the step at which they do, rank 0 saves, and the next start goes on from there with
however many ranks it has. The global batch stays the same at every size.

    torchrun --nproc-per-node 2 examples/ddp_restart.py --checkpoint /tmp/digits.pt
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 96


def main() -> None:
    options = argparse.ArgumentParser()
    own = os.environ.get("STRETTO_CHECKPOINT_DIR")
    options.add_argument("--checkpoint", type=Path, required=not own, default=Path(own) / "digits.pt" if own else None)
    options.add_argument("--steps", type=int, default=600)
    given = options.parse_args()

    told_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told_to_stop.append(number))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    torch.set_num_threads(1)  # For a network this small more threads only wait for each other.
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step = load(given.checkpoint, net, optimizer)
    model = DistributedDataParallel(net)
    if rank == 0:
        print(f"started at step {step} with {size} ranks", flush=True)

    while step < given.steps:
        mine = batch(step, len(x))[rank::size]
        loss = cross_entropy(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # The signal reaches the ranks at different steps; the largest answer makes them stop at the same one.
        stop = torch.tensor(len(told_to_stop))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if stop.item():
            break

    if rank == 0:
        save(given.checkpoint, net, optimizer, step)
        accuracy = (net(x).argmax(1) == y).float().mean().item()
        print(f"ended at step {step} accuracy {accuracy:.3f}", flush=True)
    # The wrapper first: when it is the last that holds the group, torch may wait for itself for ever.
    del model
    dist.destroy_process_group()


def batch(step: int, samples: int) -> torch.Tensor:
    """The samples of this step, the same at every size: a shuffled epoch is cut into equal parts."""
    per_epoch = samples // GLOBAL_BATCH
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(step // per_epoch))
    first = step % per_epoch * GLOBAL_BATCH
    return order[first : first + GLOBAL_BATCH]


def load(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(checkpoint: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    part = checkpoint.with_suffix(".part")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    os.replace(part, checkpoint)


if __name__ == "__main__":
    main()
