"""Tiresias' own results beside ours: with its quirks (`original`), to the digit, and by the corrected definitions.

python benchmarks/tiresias_variants.py
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.policy import load
from stretto.sim import cluster, engine, readers
from stretto.sim.trace import Trace

DATA = Path(__file__).parent.parent / "tests" / "data" / "tiresias"
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo": ("fifo", {}),
    "fjf": ("fit-first", {}),
    "sjf": ("sjf", {}),
    "shortest": ("srtf", {}),
    "shortest-gpu": ("srsf", {}),
    "dlas": ("tiresias", {"queues": (3250, 7200), "service": "time"}),
    "dlas-gpu": ("tiresias", {"queues": (3250, 7200)}),
    "dlas-gpu-1": ("tiresias", {"queues": (3250, 7200), "promote": 1}),
    "dlas-gpu-8": ("tiresias", {"queues": (3250, 7200), "promote": 8}),
    "dlas-gpu-gittins": ("tiresias-gittins", {"queues": (3250, 7200)}),
}
COLUMNS = ("avg", "p50", "p99", "max", "makespan", "preemptions")


def main() -> None:
    with (DATA / "anchors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    traces = {name: readers.read(DATA / f"{name}.csv", "tiresias") for name in ("60_job", "ef_c06")}
    show({"trace": "trace", "gpus": "GPUs", "policy": "schedule"}, "", [*COLUMNS[:-1], "stops"])
    equal = 0
    for row in rows:
        name, options = OURS[row["policy"]]
        trace, gpus = traces[row["trace"]], int(row["gpus"])
        original, corrected = (figures(trace, gpus, name, {**options, "original": flag}) for flag in (True, False))
        expected = [row[column] for column in COLUMNS]
        equal += original == expected
        if original != expected:
            show(row, "EXPECTED", expected)
        show(row, "original", original)
        show(row, "corrected", corrected)
    line = {
        "name": "tiresias_variants: rows of Tiresias' simulator reproduced to the last digit",
        "ours": equal,
        "peer": len(rows),
        "ratio": equal / len(rows),
        "unit": "rows",
        "goal": "all",
        "ok": equal == len(rows),
    }
    print(json.dumps(line))


def figures(trace: Trace, gpus: int, name: str, options: dict[str, Any]) -> list[str]:
    pools, nodes = cluster.uniform(gpus, 1)
    result = engine.simulate(trace, pools, nodes, load(name, options))
    jct_s = result.finish_s - trace.submit_s
    return [
        f"{jct_s.mean():.3f}",
        f"{np.percentile(jct_s, 50):.1f}",
        f"{np.percentile(jct_s, 99):.2f}",
        f"{jct_s.max():.0f}",
        f"{result.finish_s.max():.0f}",
        str(result.preemptions.sum()),
    ]


def show(row: dict[str, str], whose: str, values: list[str]) -> None:
    avg, p50, p99, most, makespan, stops = values
    print(
        f"{row['trace']:7} {row['gpus']:>4} {row['policy']:17} {whose:9} {avg:>11} {p50:>9} {p99:>11} {most:>9} "
        f"{makespan:>9} {stops:>5}"
    )


if __name__ == "__main__":
    main()
