"""On a machine with a GPU: resize, recovery and throughput with 4 workers sharing it over Gloo, and alone.

    python benchmarks/gpu_elastic.py [--rounds 3] [--width 2048] [--layers 6]

The gap is the longest between two steps of those who stay, less an ordinary step of the larger world (after a kill:
of theirs). Throughput is compared with torch's DDP of as many processes over Gloo on the same GPU, and alone with DDP
over NCCL in a world of one, in the same run. NCCL between several workers needs a GPU for each: not shown here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from _verdict import report
from stretto.testing import Harness

SCRIPTS = Path(__file__).parent / "scripts"
SETTLE = 30
LONG_S = 120.0

DDP = """
import os, sys, time, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
backend, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.cuda.set_device(0)
dist.init_process_group(backend)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
x = torch.randn(max(1, 12 // dist.get_world_size()), width, device="cuda")
taken = []
for step in range(80):
    began = time.monotonic()
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.cuda.synchronize()
    taken.append(time.monotonic() - began)
if dist.get_rank() == 0:
    print(sorted(taken[20:])[30])
dist.destroy_process_group()
"""


def steps(path: Path) -> list[tuple[float, int]]:
    """When each step began, and with how many workers. One that was begun again counts from its first beginning:
    the beginning of the next one is its commit."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    first: dict[int, tuple[float, int]] = {}
    for line in lines:
        if len(line) == 4:
            first.setdefault(int(line[1]), (float(line[0]), int(line[2])))
    return list(first.values())


def ordinary_s(found: list[tuple[float, int]], size: int) -> float:
    pairs = itertools.pairwise(found)
    return statistics.median(b[0] - a[0] for a, b in pairs if a[1] == b[1] == size)


def ours(folder: Path, model: dict[str, str], rounds: int) -> tuple[dict[str, list[float]], float]:
    gaps: dict[str, list[float]] = {"grow": [], "shrink": [], "kill": []}
    command = [sys.executable, str(SCRIPTS / "elastic_mlp.py")]
    environment = {**model, "STRETTO_CHECKPOINT_S": "1e9"}
    with Harness(folder, command, workers=3, min_workers=3, environment=environment) as harness:
        harness.wait_members(3, LONG_S)

        def seen() -> list[tuple[float, int]]:
            return steps(folder / f"{harness.members()[0]}.steps")

        def more(size: int) -> None:
            before = len(seen())
            harness.wait(lambda: sum(s[1] == size for s in seen()[before:]) > SETTLE, f"steps of {size}", LONG_S)

        more(3)
        for _ in range(rounds):
            for name, size in (("grow", 4), ("shrink", 3), ("again", 4), ("kill", 3)):
                since_s = time.monotonic()
                if name == "kill":
                    harness.worker(harness.members()[-1]).kill()
                else:
                    harness.want(size)
                harness.wait_members(size, LONG_S)
                more(size)
                found = seen()
                near = [s for s in found if s[0] > since_s - 2.0]
                gap_s = max(b[0] - a[0] for a, b in itertools.pairwise(near) if b[0] > since_s)
                if name in gaps:
                    gaps[name].append(max(0.0, gap_s - ordinary_s(found, 3 if name == "kill" else 4)))
        harness.want(4)
        harness.wait_members(4, LONG_S)
        more(4)
        return gaps, ordinary_s(seen(), 4)


def alone_s(folder: Path, model: dict[str, str]) -> float:
    """An ordinary step of a world of one, which has the GPU to itself."""
    command = [sys.executable, str(SCRIPTS / "elastic_mlp.py")]
    with Harness(folder, command, workers=1, environment=model) as harness:
        harness.wait(lambda: len(steps(folder / "w0.steps")) > 4 * SETTLE, "steps", LONG_S)
        return ordinary_s(steps(folder / "w0.steps")[SETTLE:], 1)


def ddp_s(backend: str, size: int, width: int, layers: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = []
    for rank in range(size):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-c", DDP, backend, str(width), str(layers)]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    told = [worker.communicate(timeout=300)[0] for worker in workers]
    return float(told[0].strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here")
        report("gpu_elastic", ours=None, peer=None, ratio=None, unit="s", goal="needs a GPU", ok=False)
        return
    model = {"WIDTH": str(options.width), "LAYERS": str(options.layers)}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.layers} layers of {options.width}")
    with tempfile.TemporaryDirectory() as folder:
        gaps, four_s = ours(Path(folder, "shared"), model, options.rounds)
        one_s = alone_s(Path(folder, "alone"), model)
    for name, values in gaps.items():
        print(
            f"{name:8} {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f}, {len(values)} times)"
        )
    gloo_s = ddp_s("gloo", 4, options.width, options.layers)
    nccl_s = ddp_s("nccl", 1, options.width, options.layers)
    print(
        f"step of 4 sharing the GPU: ours {four_s:.4f} s, DDP {gloo_s:.4f} s; "
        f"alone: ours {one_s:.4f} s, DDP {nccl_s:.4f} s"
    )
    for name, mine, peer in (("4 workers over Gloo", four_s, gloo_s), ("a world of one", one_s, nccl_s)):
        report(
            f"gpu_elastic: throughput, {name}", ours=round(1 / mine, 2), peer=round(1 / peer, 2),
            ratio=round(peer / mine, 3), unit="steps/s", goal=">= 0.97", ok=peer / mine >= 0.97,
        )  # fmt: skip
    worst = max(statistics.median(values) for values in gaps.values())
    report(
        "gpu_elastic: longest gap",
        ours=round(worst, 4),
        peer=None,
        ratio=None,
        unit="s",
        goal="<= 0.5",
        ok=worst <= 0.5,
    )


if __name__ == "__main__":
    main()
