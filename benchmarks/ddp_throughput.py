"""Throughput when nobody comes or goes: our reducer against the framework's DistributedDataParallel.

Two processes over Gloo, one thread each, both wrappers in the same two processes. Blocks of steps alternate between the
two (in turns of ours-peer and peer-ours); a pair of neighbouring blocks gives one ratio. Printed: the median of the
ratios and the interval in which the true median lies with 95 %; beside it the same of the CPU time, which a busy
machine disturbs less.

    python benchmarks/ddp_throughput.py [--blocks 15] [--block-s 0.5]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _verdict import report
from stretto.torch.groups import Group, Store, connect
from stretto.torch.reducer import Reducer

GOAL = 0.97
MEMBERS = 2


def small() -> tuple[nn.Module, torch.Tensor]:
    """A few milliseconds a step: a small convolutional net on images of 8 x 8."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10)), torch.randn(16, 1, 8, 8)


def large() -> tuple[nn.Module, torch.Tensor]:
    """25 million parameters in six layers."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 10)), torch.randn(32, 2048)


class Cost(NamedTuple):
    """Of one step."""

    wall_s: float
    cpu_s: float


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"small step": small, "25M parameters": large}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--block-s", type=float, default=0.5)
    parser.add_argument("--only", choices=list(MODELS))
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, Gloo, {MEMBERS} processes of one thread, {asked.blocks} pairs of blocks")
    figures = {}
    for name in [asked.only] if asked.only else list(MODELS):
        pairs = measure(name, asked.blocks, asked.block_s)
        figures[name] = figure(pairs)
        print(f"{name:16} {figures[name]}")
    last = list(figures.values())[-1]
    report(
        "ddp_throughput",
        ours=last["ours_ms"],
        peer=last["peer_ms"],
        ratio=min(found["ratio"] for found in figures.values()),
        unit="ms per step of the last model; ratio of throughput, the smallest of all models",
        goal=f"upper end of the interval >= {GOAL} for every model",
        ok=min(found["interval"][1] for found in figures.values()) >= GOAL,
        models=figures,
    )


def figure(pairs: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    low, middle, high = interval([peer.wall_s / ours.wall_s for ours, peer in pairs])
    cpu = interval([peer.cpu_s / ours.cpu_s for ours, peer in pairs])
    return {
        "ours_ms": round(statistics.median(ours.wall_s for ours, _ in pairs) * 1e3, 2),
        "peer_ms": round(statistics.median(peer.wall_s for _, peer in pairs) * 1e3, 2),
        "ratio": round(middle, 3),
        "interval": [round(low, 3), round(high, 3)],
        "cpu_ratio": round(cpu[1], 3),
        "cpu_interval": [round(cpu[0], 3), round(cpu[2], 3)],
    }


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median between the order statistics that enclose the true one with 95 % (sign test)."""
    ordered = sorted(ratios)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], statistics.median(ordered), ordered[count - 1 - rank]


def measure(name: str, blocks: int, block_s: float) -> list[tuple[Cost, Cost]]:
    """The cost of a step of ours and of the peer, for every pair of blocks."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(MEMBERS)]
    workers = [
        context.Process(target=work, args=(rank, name, blocks, block_s, pipe[1])) for rank, pipe in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    here = [pipe[0] for pipe in pipes]
    addresses = [pipe.recv() for pipe in here]
    for pipe in here:
        pipe.send(addresses)
    found: list[tuple[Cost, Cost]]
    found, *_ = [pipe.recv() for pipe in here]
    for worker in workers:
        worker.join()
    return found


def work(rank: int, name: str, blocks: int, block_s: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = Store()
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send((store.address, rendezvous.port))
    told = pipe.recv()
    group = connect(1, rank, [address for address, _ in told], timeout_s=60)
    shared = dist.TCPStore("127.0.0.1", told[0][1], is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=MEMBERS)
    ours, peer = our_step(name, group), peer_step(name)
    counts = [calibrate(step, block_s) for step in (ours, peer)]
    count = max(2, min(counts))
    pairs = []
    for block in range(blocks):
        order = (ours, peer) if block % 2 else (peer, ours)
        times = {step: timed(step, count) for step in order}
        pairs.append((times[ours], times[peer]))
    pipe.send(pairs)
    # The rendezvous stays until everybody has finished.
    dist.barrier()
    dist.destroy_process_group()
    group.close()
    store.close()


def calibrate(step: Callable[[], None], block_s: float) -> int:
    """How many steps a block takes; everybody must do as many, so the slowest decides."""
    for _ in range(5):
        step()
    took = torch.tensor([timed(step, 5).wall_s])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return round(block_s / float(took))


def timed(step: Callable[[], None], count: int) -> Cost:
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    return Cost((time.perf_counter() - begin) / count, (time.process_time() - begin_cpu) / count)


def our_step(name: str, group: Group) -> Callable[[], None]:
    torch.manual_seed(0)
    model, x = MODELS[name]()
    y = torch.randint(10, (len(x),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reducer = Reducer(model.parameters())

    def step() -> None:
        reducer.exchange(group, 1 / MEMBERS, (1.0,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if reducer.failed:
            raise reducer.failed
        optimizer.step()
        if reducer.flags[0] != MEMBERS:
            raise AssertionError("not everybody took part")

    return step


def peer_step(name: str) -> Callable[[], None]:
    torch.manual_seed(0)
    bare, x = MODELS[name]()
    y = torch.randint(10, (len(x),))
    # At its best: the buffers are not sent round, as the reducer does not do that either.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = DistributedDataParallel(bare, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
