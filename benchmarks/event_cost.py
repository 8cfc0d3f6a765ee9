"""How the cost of an event grows with the number of active jobs, for list policies.

    python benchmarks/event_cost.py [--most N]

The load is kept level: n jobs at the start, half of which fit, and a newcomer for every job that ends on average. The
limit, and the peer, is growth by n log n from the smallest n. Below, the general engine under srtf for comparison.
"""

from __future__ import annotations

import argparse
import json
import math
import time

import numpy as np

from stretto.core.policy import Policy, load
from stretto.sim import cluster, engine, listrun
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

POLICIES = ("fifo", "fit-first", "sjf", "srtf", "srsf", "edf", "priority", "tiresias", "tiresias-gittins")
SIZES = (100, 300, 1000, 3000, 10_000)
GENERAL_MOST = 1000
WALKED_MOST = 3000
"""Policies that look at every running job at every event are measured up to here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="largest number of active jobs")
    sizes = [n for n in SIZES if n <= parser.parse_args().most]
    print("us/event by active jobs" + "".join(f"{n:>9}" for n in sizes) + "   growth")
    cost_us(sizes[0], load("fifo"))  # Imports and caches.
    worst_name, worst = "", 0.0
    for name in POLICIES:
        within = [n for n in sizes if name != "tiresias-gittins" or n <= WALKED_MOST]
        costs = [cost_us(n, load(name)) for n in within]
        growth = grows(within[0], within[-1], costs[0], costs[-1])
        show(name, costs, len(sizes), growth)
        if growth > worst:
            worst_name, worst = name, growth
    within = [n for n in sizes if n <= GENERAL_MOST]
    general = [cost_us(n, load("srtf"), general=True) for n in within]
    show("srtf, general engine", general, len(sizes), grows(within[0], within[-1], general[0], general[-1]))
    line = {
        "name": f"event_cost: growth of the cost per event, the largest of all list policies ({worst_name})",
        "ours": round(worst, 4),
        "peer": 1.0,
        "ratio": round(worst, 4),
        "unit": "growth over that of n log n",
        "goal": "at most 1",
        "ok": worst <= 1.0,
    }
    print(json.dumps(line))


def grows(few: int, many: int, low_us: float, high_us: float) -> float:
    """Growth of the cost between two sizes, over the growth of n log n."""
    return (high_us / low_us) / (many * math.log(many) / (few * math.log(few)))


def cost_us(active: int, policy: Policy, general: bool = False) -> float:
    trace, gpus = level_load(active)
    pools, nodes = cluster.uniform(gpus, 1)
    runner = engine.Engine(trace, pools, nodes, policy, Settings()).run
    start = time.process_time()
    result = runner() if general else listrun.run(trace, pools, nodes, policy, Settings(), None)
    return 1e6 * (time.process_time() - start) / result.events


def level_load(active: int) -> tuple[Trace, int]:
    """So many jobs at once, as many again one by one; and GPUs for half of the first."""
    random = np.random.default_rng(active)
    jobs = 2 * active
    gpus = random.choice([1, 1, 1, 1, 2, 4, 8], jobs)
    length_s = np.round(random.exponential(1000.0, jobs) + 1, 3)
    room = max(8, int(gpus.mean() * active / 2))
    submit_s = np.zeros(jobs)
    submit_s[active:] = np.round(np.cumsum(random.exponential(2000.0 / active, active)), 3)
    trace = Trace.build(
        f"level-{active}",
        [str(i) for i in range(jobs)],
        submit_s.tolist(),
        gpus.tolist(),
        length_s.tolist(),
        priority=random.integers(0, 3, jobs).tolist(),
        deadline_s=(submit_s + length_s * random.uniform(1, 10, jobs)).tolist(),
    )
    return trace, room


def show(name: str, costs: list[float], columns: int, growth: float) -> None:
    cells = "".join(f"{cost:9.1f}" for cost in costs) + " " * 9 * (columns - len(costs))
    print(f"{name:23}{cells}   {growth:.3f}", flush=True)


if __name__ == "__main__":
    main()
