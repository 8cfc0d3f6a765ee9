"""Workers that share one GPU over Gloo: what a resize and a lost worker cost, and throughput against DDP's.

    python benchmarks/gpu_elastic.py [--rounds 5] [--blocks 11]

Needs a GPU. As `elastic_resize.py` and `ddp_throughput.py` do it, on the GPU: 3 → 4 workers of a 25-million-parameter
model, 4 → 3, and `kill -9` of one of four; newcomers are warm. Throughput of 4 workers over Gloo, and of a world of
one, whose peer is DDP over NCCL. NCCL refuses two workers on one GPU, so between workers it cannot be shown here: only
that a group of one can be made, sums, and lets go when it is aborted.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

from _measure import interval, machine
from _verdict import report
from ddp_throughput import GOAL, MODELS, figure, measure
from ddp_throughput import shown as shown_ratio
from elastic_resize import CHANGES, ours, seconds
from stretto.backends.local.forkserver import ForkServer
from stretto.torch.groups import Group
from stretto.torch.rendezvous import Store

FEW = 3
MODEL = {"WIDTH": "2048", "LAYERS": "6"}
LIMIT_S = 0.5


def copy_s(elements: int) -> float:
    """The state on the way that it must take: from the GPU, through a socket, to the GPU."""
    here, there = socket.socketpair()
    source = torch.zeros(elements, device="cuda")
    target = torch.zeros(elements, device="cuda")
    landing = torch.empty(elements, pin_memory=True)
    sent = torch.empty(elements, pin_memory=True)

    def send() -> None:
        sent.copy_(source)
        here.sendall(sent.view(torch.uint8).numpy().data)

    torch.cuda.synchronize()
    began_s = time.monotonic()
    sender = threading.Thread(target=send)
    sender.start()
    view = landing.view(torch.uint8).numpy().data
    while len(view):
        view = view[there.recv_into(view, len(view), socket.MSG_WAITALL) :]
    target.copy_(landing)
    torch.cuda.synchronize()
    sender.join()
    here.close()
    there.close()
    return time.monotonic() - began_s


def nccl_alone() -> str:
    """What of NCCL one GPU can show."""
    store = Store()
    group = Group(1, 0, [store.address], "cuda:0")
    began_s = time.monotonic()
    group._open_nccl()
    made_s = time.monotonic() - began_s
    tensor = torch.ones(1 << 20, device="cuda")
    group._nccl.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    right = bool((tensor == 1).all())
    began_s = time.monotonic()
    group.abort()
    group.close()
    store.close()
    took_s = time.monotonic() - began_s
    return f"a group of one made in {made_s:.2f} s, sum {'right' if right else 'wrong'}, let go in {took_s:.2f} s"


def resizes(rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in CHANGES}
    with (
        tempfile.TemporaryDirectory() as folder,
        ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch")) as warm,
    ):
        warm.wait_ready()
        for number in range(rounds):
            costs = ours(Path(folder, str(number)), MODEL, warm, few=FEW)
            print(f"round {number + 1}: {seconds(costs)}", flush=True)
            for name, values in found.items():
                values.append(costs[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=11)
    options = parser.parse_args()
    print(machine())
    if not torch.cuda.is_available():
        print("there is no GPU here")
        report("gpu_elastic", ours=None, peer=None, ratio=None, unit="s", goal="needs a GPU", ok=False)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"NCCL: {nccl_alone()}", flush=True)
    state = 2 * int(MODEL["LAYERS"]) * (int(MODEL["WIDTH"]) + 1) * int(MODEL["WIDTH"])
    plain_s = statistics.median(copy_s(state) for _ in range(5))
    print(f"the bytes of the state alone, GPU to socket to GPU: {plain_s:.3f} s", flush=True)
    gaps = resizes(options.rounds)
    for name, values in gaps.items():
        low, middle, high = interval(values)
        print(f"{name:8} {middle:.3f} s ({low:.3f} to {high:.3f}, {len(values)} times)")
    for members, peer in ((FEW + 1, "DDP over Gloo"), (1, "DDP over NCCL")):
        for name, told in MODELS.items():
            _, rounds = measure(name, options.blocks, 0.5, members, "cuda")
            found = figure(rounds)
            print(f"{members} worker(s), {told}: ours {found['ours_ms']} ms, {peer} {found['peer_ms']} ms a step")
            print(f"  throughput {shown_ratio(found['ratio'])}", flush=True)
            report(
                f"gpu_elastic: throughput of {members}, {told}", ours=found["ours_ms"], peer=found["peer_ms"],
                ratio=found["ratio"][1], unit="ms per step", goal=f"upper end of the interval >= {GOAL}",
                ok=found["ratio"][2] >= GOAL, interval=found["ratio"],
            )  # fmt: skip
    worst = max(statistics.median(values) for values in gaps.values())
    report(
        "gpu_elastic: longest gap", ours=round(worst, 4), peer=round(plain_s, 4), ratio=round(worst / plain_s, 2),
        unit="s", goal=f"<= {LIMIT_S} s plus the bytes of the state alone", ok=worst <= LIMIT_S + plain_s,
        gaps={name: [round(value, 4) for value in interval(values)] for name, values in gaps.items()},
    )  # fmt: skip


if __name__ == "__main__":
    main()
