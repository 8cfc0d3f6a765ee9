"""How the cost of an event grows with the number of active jobs, for list policies and `stretto`.

    python benchmarks/event_cost.py [--most N]

The load is kept level: n jobs at the start, half of which fit, and a newcomer for every job that ends on average.
List policies run incrementally; `stretto` is asked about all jobs at every event, here elastic ones. The limit, and
the peer, is growth by n log n over the whole range. Growth from one size to the next is shown too: there a policy that
is far below the limit at first may come close to it, and a busy machine shows.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time

import numpy as np

from _verdict import report
from stretto.core.policy import load
from stretto.sim import cluster, engine
from stretto.sim.trace import Trace

POLICIES = ("fifo", "fit-first", "sjf", "srtf", "srsf", "edf", "priority", "tiresias", "tiresias-gittins", "stretto")
SIZES = (100, 300, 1000, 3000, 10_000)
WALK_ALL = ("tiresias-gittins", "stretto")
WALKED_MOST = 3000
"""Policies that look at every job at every event are measured up to here."""
AGAIN_MOST = 1000
WIDEST = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="largest number of active jobs")
    sizes = [n for n in SIZES if n <= parser.parse_args().most]
    if len(sizes) < 2:
        parser.error(f"--most must be at least {SIZES[1]}: growth needs two sizes")
    print("us/event by active jobs" + "".join(f"{n:>9}" for n in sizes) + "   growth  largest step")
    cost_us("fifo", sizes[0])  # Imports and caches.
    whole: dict[str, float] = {}
    step: dict[str, float] = {}
    for name in POLICIES:
        within = [n for n in sizes if name not in WALK_ALL or n <= WALKED_MOST]
        curve = [(n, cost_us(name, n)) for n in within]
        whole[name] = grows(curve[0], curve[-1])
        step[name] = max(grows(*pair) for pair in itertools.pairwise(curve))
        cells = "".join(f"{cost:9.1f}" for _, cost in curve) + " " * 9 * (len(sizes) - len(curve))
        print(f"{name:23}{cells}   {whole[name]:6.3f}  {step[name]:12.3f}", flush=True)
    worst, steepest = max(whole, key=whole.__getitem__), max(step, key=step.__getitem__)
    report(
        f"event_cost: growth of the cost per event, the largest of all policies ({worst})",
        ours=round(whole[worst], 4),
        peer=1.0,
        ratio=round(whole[worst], 4),
        unit="growth over that of n log n",
        goal="<= 1",
        ok=whole[worst] <= 1.0,
        largest_step=f"{steepest}: {step[steepest]:.3f}",
    )


def grows(low: tuple[int, float], high: tuple[int, float]) -> float:
    """Growth of the cost between two points (active jobs, cost) of the curve, over the growth of n log n."""
    (few, low_us), (many, high_us) = low, high
    return (high_us / low_us) / (many * math.log(many) / (few * math.log(few)))


def cost_us(name: str, active: int) -> float:
    """CPU time per event, the best of three where that does not take long."""
    policy = load(name)
    trace, gpus = level_load(active)
    pools, nodes = cluster.uniform(gpus, 1)
    costs = []
    for _ in range(1 if active > AGAIN_MOST else 3):
        start = time.process_time()
        result = engine.simulate(trace, pools, nodes, policy)
        costs.append(1e6 * (time.process_time() - start) / result.events)
    return min(costs)


def level_load(active: int) -> tuple[Trace, int]:
    """So many jobs at once, as many again one by one; and GPUs for half of the first at their requested sizes."""
    random = np.random.default_rng(active)
    jobs = 2 * active
    gpus = random.choice([1, 1, 1, 1, 2, 4, WIDEST], jobs)
    length_s = np.round(random.exponential(1000.0, jobs) + 1, 3)
    room = max(WIDEST, int(gpus.mean() * active / 2))
    submit_s = np.zeros(jobs)
    submit_s[active:] = np.round(np.cumsum(random.exponential(2000.0 / active, active)), 3)
    rates = np.arange(WIDEST + 1, dtype=np.float64) ** 0.8
    trace = Trace.build(
        f"level-{active}",
        [str(i) for i in range(jobs)],
        submit_s.tolist(),
        gpus.tolist(),
        length_s.tolist(),
        work=(length_s * rates[gpus]).tolist(),
        curve=[0] * jobs,
        rates=rates[None, None],
        min_workers=[1] * jobs,
        max_workers=[WIDEST] * jobs,
        priority=random.integers(0, 3, jobs).tolist(),
        deadline_s=(submit_s + length_s * random.uniform(1, 10, jobs)).tolist(),
    )
    return trace, room


if __name__ == "__main__":
    main()
