"""Throughput when nobody comes or goes: the whole loop of a user, against the framework's DistributedDataParallel.

Two workers over Gloo, one thread each. Ours is the loop of the documentation with all that belongs to it: coordinator,
heartbeats, ledger, rollback copies, reports, a checkpoint a minute. The peer's is a plain loop over a DataLoader with a
DistributedSampler, and keeps nothing. Both live in the same two processes (`scripts/throughput.py`), and blocks of
steps alternate between them (in turns of ours-peer and peer-ours); a pair of neighbouring blocks gives one ratio.
Printed: the median of the ratios and the interval in which the true median lies with 95 %; beside it the same of the
CPU time, which a busy machine disturbs less; and both of the reducer alone, on one ready batch.

    python benchmarks/ddp_throughput.py [--rounds 41] [--block-s 0.2] [--only small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from _measure import interval, machine
from _verdict import report
from stretto.testing import Harness

GOAL = 0.97
MEMBERS = 2
MODELS = {"small": "small step", "large": "25M parameters"}
SCRIPT = Path(__file__).parent / "scripts" / "throughput.py"
LONG_S = 600.0

Round = dict[str, tuple[float, float]]
"""Seconds and CPU seconds of a step of each side."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--block-s", type=float, default=0.2)
    parser.add_argument("--only", choices=list(MODELS))
    asked = parser.parse_args()
    print(machine())
    print(f"torch {torch.__version__}, Gloo, {MEMBERS} workers of one thread, {asked.rounds} rounds of blocks")
    print(
        "peer: DistributedDataParallel(broadcast_buffers=False, gradient_as_bucket_view=True), "
        "DataLoader(num_workers=0, sampler=DistributedSampler), the default buckets of 25 MiB"
    )
    figures = {}
    for name in [asked.only] if asked.only else list(MODELS):
        count, rounds = measure(name, asked.rounds, asked.block_s)
        figures[name] = found = figure(rounds)
        print(f"{MODELS[name]} ({count} steps a block): ours {found['ours_ms']} ms, peer {found['peer_ms']} ms a step")
        print(f"  throughput  {shown(found['ratio'])}; by CPU time {shown(found['cpu_ratio'])}")
        alone = shown(found["reducer_ratio"])
        print(f"  the reducer alone {alone}; by CPU time {shown(found['reducer_cpu_ratio'])}", flush=True)
    worst = min(figures.values(), key=lambda found: found["ratio"][1])
    report(
        "ddp_throughput",
        ours=worst["ours_ms"],
        peer=worst["peer_ms"],
        ratio=worst["ratio"][1],
        unit="ms per step; ratio of throughput; of the model where it is least",
        goal=f"upper end of the interval >= {GOAL} for every model",
        ok=min(found["ratio"][2] for found in figures.values()) >= GOAL,
        models=figures,
        rounds=asked.rounds,
        machine=machine(),
    )


def measure(
    name: str, rounds: int, block_s: float, members: int = MEMBERS, device: str = "cpu"
) -> tuple[int, list[Round]]:
    """Steps in a block, and what a step of each side cost in every round."""
    environment = {
        "MODEL": name, "ROUNDS": str(rounds), "BLOCK_S": str(block_s), "MEMBERS": str(members), "DEVICE": device,
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT)]
        with Harness(Path(folder), command, workers=members, min_workers=members, environment=environment) as job:
            end = job.wait_over(LONG_S)
            if end["event"] != "done":
                sys.exit(f"the job failed:\n{job.describe()}")
        found = json.loads(Path(folder, "w0.json").read_text())
    return found["steps"], found["rounds"]


def figure(rounds: list[Round]) -> dict[str, Any]:
    def ratios(side: str, kind: int) -> list[float]:
        return [round(value, 3) for value in interval([one["ddp"][kind] / one[side][kind] for one in rounds])]

    return {
        "ours_ms": round(statistics.median(one["ours"][0] for one in rounds) * 1e3, 2),
        "peer_ms": round(statistics.median(one["ddp"][0] for one in rounds) * 1e3, 2),
        "ratio": ratios("ours", 0),
        "cpu_ratio": ratios("ours", 1),
        "reducer_ratio": ratios("reducer", 0),
        "reducer_cpu_ratio": ratios("reducer", 1),
    }


def shown(found: list[float]) -> str:
    low, middle, high = found
    return f"{middle:.3f} of the peer's ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
