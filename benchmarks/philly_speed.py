"""How long 82,247 jobs take: Microsoft's Philly trace on 64 nodes of 8 GPUs under list policies and `stretto`.

    python benchmarks/philly_speed.py [FILE or FOLDER] [--all]

The trace does not come with the repository: name philly_82k.csv (petuum/adaptdl, branch osdi21-artifact,
simulator/traces/philly.csv) or a folder that has it, here or in STRETTO_DATA. Timed are fifo, srtf, tiresias and
stretto, with `--all` the other list policies too: CPU seconds without reading the file. The peer is the plain way to
simulate srtf, on the whole trace and with the same result: at every event sort the jobs that are there and walk them.
It computes finish times alone: no reasons, no record of who ran when.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import time
from pathlib import Path

import numpy as np

from _verdict import report
from stretto.core.policy import load
from stretto.sim import cluster, engine, readers
from stretto.sim.trace import Trace

NODES, DEVICES = 64, 8
GOAL_S, STRETTO_GOAL_S, GOAL_MB = 10.0, 60.0, 300.0
TIMED = ("fifo", "srtf", "tiresias")
OTHERS = ("fit-first", "sjf", "srsf", "srjf", "edf", "priority")
NAME = "philly_speed: 82,247 jobs under srtf; goal: slowest of fifo, srtf and tiresias, and stretto"
GOAL = f"< {GOAL_S:g} CPU s each, stretto < {STRETTO_GOAL_S:g}, peak memory < {GOAL_MB:g} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default=os.environ.get("STRETTO_DATA", ""))
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    path = find(Path(arguments.path)) if arguments.path else None
    if path is None:
        print("philly_82k.csv is missing: give its path, or set STRETTO_DATA to a folder that has it")
        report(NAME, ours=None, peer=None, ratio=None, unit="CPU s", goal=GOAL, ok=False)
        return
    trace = readers.read(path, "philly")
    pools, nodes = cluster.uniform(NODES, DEVICES)
    print(f"{'policy':12} {'CPU s':>8} {'us/event':>9} {'events':>9} {'preempted':>10} {'average JCT':>12} {'p99':>12}")
    spent, mean_s = {}, {}
    for name in (*TIMED, "stretto", *(OTHERS if arguments.all else ())):
        start = time.process_time()
        result = engine.simulate(trace, pools, nodes, load(name))
        spent[name] = time.process_time() - start
        jct_s = result.finish_s - trace.submit_s
        mean_s[name] = float(jct_s.mean())
        print(
            f"{name:12} {spent[name]:8.2f} {1e6 * spent[name] / result.events:9.1f} {result.events:9} "
            f"{result.preemptions.sum():10} {mean_s[name]:12.1f} {np.percentile(jct_s, 99):12.1f}",
            flush=True,
        )
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    start = time.process_time()
    plain_s = float((np.array(plain(trace, NODES * DEVICES)) - trace.submit_s).mean())
    peer = time.process_time() - start
    print(f"{'plain srtf':12} {peer:8.2f} {'':31}{plain_s:12.1f}")
    print(f"peak memory without the peer {peak_mb:.0f} MB")
    same = math.isclose(plain_s, mean_s["srtf"], rel_tol=1e-9)
    slowest = max(spent[name] for name in TIMED)
    report(
        NAME,
        ours=round(spent["srtf"], 2),
        peer=round(peer, 2),
        ratio=round(peer / spent["srtf"], 2),
        unit="CPU s",
        goal=GOAL,
        ok=same and slowest < GOAL_S and spent["stretto"] < STRETTO_GOAL_S and peak_mb < GOAL_MB,
        slowest=round(slowest, 2),
        stretto=round(spent["stretto"], 1),
        peak_mb=round(peak_mb),
        same_result=same,
    )


def find(path: Path) -> Path | None:
    """The file itself, or in the folder, wherever below."""
    if path.is_file():
        return path
    return next(iter(sorted(path.rglob("philly_82k.csv"))), None) if path.is_dir() else None


def plain(trace: Trace, gpus: int) -> list[float]:
    """Finish times under srtf, the plain way."""
    submit_s, need, left_s = trace.submit_s.tolist(), trace.requested.tolist(), trace.duration_s.tolist()
    finish_s = [0.0] * len(submit_s)
    present: list[int] = []
    running: list[int] = []
    now_s, coming = 0.0, 0
    while present or coming < len(submit_s):
        end_s = now_s + min((left_s[j] for j in running), default=math.inf)
        next_s = min(end_s, submit_s[coming] if coming < len(submit_s) else math.inf)
        for j in running:
            left_s[j] -= next_s - now_s
            if left_s[j] <= 1e-6:
                finish_s[j] = next_s
                present.remove(j)
        now_s = next_s
        while coming < len(submit_s) and submit_s[coming] <= now_s:
            present.append(coming)
            coming += 1
        present.sort(key=left_s.__getitem__)
        running, free = [], gpus
        for j in present:
            if need[j] <= free:
                running.append(j)
                free -= need[j]
                if not free:
                    break
    return finish_s


if __name__ == "__main__":
    main()
