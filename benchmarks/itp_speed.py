"""ITP cluster06 (2,396 jobs, 128 GPUs) against Tiresias' own simulator, with the same results to the digit.

    python benchmarks/itp_speed.py

The peer's CPU (user) seconds were measured once, with Python 2.7 on two shared cores: clean ones for fifo, shortest
and dlas-gpu, on a loaded machine for the others. Ours are the best of three runs, without reading the file.
"""

from __future__ import annotations

import csv
import json
import time

from stretto.core.policy import load
from stretto.sim import cluster, engine, readers
from tiresias_variants import DATA, OURS

GOAL = 20.0
CLEAN = ("fifo", "shortest", "dlas-gpu")
PEER_S = {
    "fifo": 3.93, "fjf": 6.97, "sjf": 4.90, "shortest": 4.00, "shortest-gpu": 4.37, "dlas-gpu": 3.68,
    "dlas-gpu-8": 12.36, "dlas-gpu-gittins": 15.30,
}  # fmt: skip


def main() -> None:
    trace = readers.read(DATA / "ef_c06.csv", "tiresias")
    with (DATA / "anchors.csv").open(newline="") as file:
        expected = {row["policy"]: row["avg"] for row in csv.DictReader(file) if row["trace"] == "ef_c06"}
    pools, nodes = cluster.uniform(16, 8)
    print(f"{'schedule':17} {'Tiresias s':>10} {'ours s':>8} {'faster':>8} {'average JCT':>12}")
    ratios: dict[str, tuple[float, float]] = {}
    same = True
    for schedule in PEER_S:
        name, options = OURS[schedule]
        policy = load(name, {**options, "original": True})
        spent = []
        for _ in range(3):
            start = time.process_time()
            result = engine.simulate(trace, pools, nodes, policy)
            spent.append(time.process_time() - start)
        average = f"{(result.finish_s - trace.submit_s).mean():.3f}"
        same &= average == expected[schedule]
        ratios[schedule] = (PEER_S[schedule] / min(spent), min(spent))
        print(
            f"{schedule:17} {PEER_S[schedule]:10.2f} {min(spent):8.3f} {ratios[schedule][0]:7.0f}x {average:>12}"
            f" {'' if average == expected[schedule] else 'NOT ' + expected[schedule]}"
        )
    slowest = min(CLEAN, key=lambda schedule: ratios[schedule][0])
    ratio, ours = ratios[slowest]
    line = {
        "name": f"itp_speed: ITP cluster06, least ratio of {', '.join(CLEAN)} ({slowest})",
        "ours": round(ours, 4),
        "peer": PEER_S[slowest],
        "ratio": round(ratio, 1),
        "unit": "CPU s",
        "goal": f"at least {GOAL:g} times faster, equal averages",
        "ok": same and ratio >= GOAL,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
