"""How long 82,247 jobs take: Microsoft's Philly trace on 64 nodes of 8 GPUs under list policies and `stretto`.

    python benchmarks/philly_speed.py [FILE or FOLDER] [--all]

The trace does not come with the repository: name philly_82k.csv (petuum/adaptdl, branch osdi21-artifact,
simulator/traces/philly.csv) or a folder that has it, here or in STRETTO_DATA. Timed are fifo, srtf, tiresias and
stretto, with `--all` the other list policies too: CPU seconds without reading the file. The peer is the general
engine, which asks for a snapshot's worth of decision at every event, on the trace's first 3,000 jobs under srtf.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import msgspec
import numpy as np

from stretto.core.policy import load
from stretto.sim import cluster, engine, listrun, readers
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

GOAL_S, STRETTO_GOAL_S, GOAL_MB = 10.0, 60.0, 300.0
TIMED = ("fifo", "srtf", "tiresias")
OTHERS = ("fit-first", "sjf", "srsf", "srjf", "edf", "priority")
SLICE = 3000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default=os.environ.get("STRETTO_DATA", ""))
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    path = find(Path(arguments.path)) if arguments.path else None
    if path is None:
        print("philly_82k.csv is missing: give its path, or set STRETTO_DATA to a folder that has it")
        report(None, None, None, ok=False)
        return
    trace = readers.read(path, "philly")
    pools, nodes = cluster.uniform(64, 8)
    print(f"{'policy':12} {'CPU s':>8} {'us/event':>9} {'events':>9} {'preempted':>10} {'average JCT':>12} {'p99':>12}")
    spent: dict[str, float] = {}
    for name in (*TIMED, "stretto", *(OTHERS if arguments.all else ())):
        start = time.process_time()
        result = engine.simulate(trace, pools, nodes, load(name))
        spent[name] = time.process_time() - start
        jct_s = result.finish_s - trace.submit_s
        print(
            f"{name:12} {spent[name]:8.2f} {1e6 * spent[name] / result.events:9.1f} {result.events:9} "
            f"{result.preemptions.sum():10} {jct_s.mean():12.1f} {np.percentile(jct_s, 99):12.1f}",
            flush=True,
        )
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"peak memory {peak_mb:.0f} MB")
    worst_s = max(spent[name] for name in TIMED)
    fast = worst_s < GOAL_S and spent["stretto"] < STRETTO_GOAL_S
    report(worst_s, peak_mb, side_by_side(trace), ok=fast and peak_mb < GOAL_MB, stretto_s=spent["stretto"])


def find(path: Path) -> Path | None:
    """The file itself, or in the folder, wherever below."""
    if path.is_file():
        return path
    return next(iter(sorted(path.rglob("philly_82k.csv"))), None) if path.is_dir() else None


def side_by_side(trace: Trace) -> tuple[float, float]:
    """CPU seconds of the incremental runner and of the general engine for the same jobs."""
    first = np.arange(len(trace)) < SLICE
    columns = {
        field: value[first]
        for field in trace.__struct_fields__
        if isinstance(value := getattr(trace, field), np.ndarray) and len(value) == len(trace)
    }
    part = msgspec.structs.replace(trace, ids=trace.ids[:SLICE], **columns).rigid()
    pools, nodes = cluster.uniform(8, 8)
    policy, world = load("srtf"), Settings()
    start = time.process_time()
    ours = listrun.run(part, pools, nodes, policy, world, None)
    middle = time.process_time()
    general = engine.Engine(part, pools, nodes, policy, world).run()
    end = time.process_time()
    assert ours.finish_s.tolist() == general.finish_s.tolist()
    print(f"first {SLICE} jobs on 64 GPUs under srtf: {middle - start:.3f} s, general engine {end - middle:.3f} s")
    return middle - start, end - middle


def report(
    worst_s: float | None,
    peak_mb: float | None,
    pair: tuple[float, float] | None,
    *,
    ok: bool,
    stretto_s: float | None = None,
) -> None:
    line = {
        "name": "philly_speed: slowest of fifo, srtf and tiresias; the peer and the ratio are for the first jobs only",
        "ours": worst_s and round(worst_s, 2),
        "peer": pair and round(pair[1], 3),
        "ratio": pair and round(pair[1] / pair[0], 1),
        "unit": "CPU s",
        "goal": f"< {GOAL_S:g} CPU s each, stretto < {STRETTO_GOAL_S:g}, peak memory < {GOAL_MB:g} MB",
        "ok": ok,
        "stretto": stretto_s and round(stretto_s, 1),
        "peak_mb": peak_mb and round(peak_mb),
        "ours_for_first_jobs": pair and round(pair[0], 3),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
