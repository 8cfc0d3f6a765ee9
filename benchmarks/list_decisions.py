"""How long one decision takes for 10,000 jobs on 10,000 GPUs, by every list policy and by `stretto`.

    python benchmarks/list_decisions.py [--jobs N] [--gpus N]

CPU seconds of `decide` with all reasons, the best of five, on a random snapshot: the first decision, and one
that carries the memory of an earlier one. The peer: what Gavel reports for its linear programme and 2,048 jobs.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import msgspec
import numpy as np

from stretto.core import invariants
from stretto.core.decision import Memory
from stretto.core.policy import Policy, load
from stretto.core.snapshot import Snapshot
from stretto.sim import sample

GOAL_S, GAVEL_S = 0.1, 0.083
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fifo", {}), ("fit-first", {}), ("sjf", {}), ("srjf", {}), ("srtf", {}), ("srsf", {}), ("edf", {}),
    ("priority", {}), ("tiresias", {}), ("tiresias", {"promote": 8}), ("tiresias-gittins", {}),
    ("srtf", {"original": True}), ("tiresias", {"original": True}), ("tiresias-gittins", {"original": True}),
    ("stretto", {}),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--gpus", type=int, default=10_000)
    arguments = parser.parse_args()
    view = sample.snapshot(arguments.jobs, arguments.gpus)
    print(f"{'policy':34} {'first ms':>9} {'later ms':>9} {'running':>8}")
    slowest, ours = "", 0.0
    for name, options in CASES:
        policy = load(name, options)
        first_s, memory, running = seconds(policy, view, None)
        later_s, _, _ = seconds(policy, later(view), memory)
        title = f"{name} {' '.join(f'{k}={v}' for k, v in options.items())}"
        print(f"{title:34} {1000 * first_s:9.2f} {1000 * later_s:9.2f} {running:8}")
        if max(first_s, later_s) > ours:
            slowest, ours = title.strip(), max(first_s, later_s)
    line = {
        "name": f"list_decisions: {arguments.jobs} jobs on {arguments.gpus} GPUs, the slowest is {slowest}",
        "ours": round(ours, 4),
        "peer": GAVEL_S,
        "ratio": round(GAVEL_S / ours, 2),
        "unit": "CPU s",
        "goal": f"< {GOAL_S:g} s for every list policy and for stretto",
        "ok": ours < GOAL_S,
    }
    print(json.dumps(line))


def seconds(policy: Policy, view: Snapshot, memory: Memory) -> tuple[float, Memory, int]:
    """CPU seconds of a decision, the memory it leaves, and how many jobs run."""
    spent = []
    for _ in range(5):
        start = time.process_time()
        decision = policy.decide(view, memory)
        spent.append(time.process_time() - start)
    invariants.check(policy, view, decision)
    return min(spent), decision.memory, int((decision.workers > 0).sum())


def later(view: Snapshot) -> Snapshot:
    """A minute later."""
    runs = np.where(view.workers > 0, 60.0, 0.0)
    return msgspec.structs.replace(
        view,
        now_s=view.now_s + 60,
        ran_s=view.ran_s + runs,
        gpu_s=view.gpu_s + runs * view.workers,
        waited_s=view.waited_s + 60.0 - runs,
    )


if __name__ == "__main__":
    main()
