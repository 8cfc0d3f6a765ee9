"""Jobs of which nobody knows how they scale, simulated: what finding the right sizes costs all of them together.

1,000 jobs of the generator (`sim.generate`; log-normal lengths around 20 minutes, half of them ask for several GPUs) on
64 GPUs, each of a class of its own, so that nothing is known of any of them beforehand. Three workloads: all are
fastest on one GPU (*falls*), all at a size in the middle (*peak*), or a third each of these and of jobs that scale
(*mixed*: no goal of fairness there; on a full cluster a job that scales may be taken for one that does not by a single
measurement, until it falls behind).
They arrive so that the GPU-seconds that they need at the sizes where they are fastest are 0.9 of what there is.

Learned: a size is measured by windows of 0.3 s as the live system's, each with an error of 10 %; every resize costs
0.5 s. The same world in which everybody knows the curves is the peer. Fairness is the worst finish-time fairness, as
for the goals of the field: completion time against equal sharing with known curves at no cost.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np

from _measure import machine
from _verdict import report
from stretto.core.policy import load
from stretto.sim import cluster, generate, readers, runner
from stretto.sim.generate import Workload
from stretto.sim.metrics import Metrics
from stretto.sim.readers import plain
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

JOBS, NODES, GPUS = 1000, "8x8", 64
LOAD, WIDE = 0.9, 0.5
KNOWN = Settings(resize_s=0.5)
LEARNED = msgspec.structs.replace(KNOWN, curves="learned", observe_s=0.3, observe_sd=0.1)
MEAN, FAIRNESS = 1.05, 1.5


def simulated() -> bool:
    """Whether all goals of `stretto` are met; `afs-l` is reported beside it."""
    met = True
    for curves in ("falls", "peak", "mixed"):
        trace = workload(curves)
        for policy in ("stretto", "afs-l"):
            met &= compared(curves, trace, policy, counts=policy == "stretto", fair=curves != "mixed")
    return met


def compared(curves: str, trace: Trace, policy: str, *, counts: bool, fair: bool) -> bool:
    """Learned against known; a policy that does not count has no goal, and one of fairness only where that is said."""
    ours, peer = figures(trace, policy, LEARNED), figures(trace, policy, KNOWN)
    ratio = ours.avg_jct_s / peer.avg_jct_s
    rows = (
        ("mean", ours.avg_jct_s, peer.avg_jct_s, ratio, "s", MEAN, counts),
        ("fairness", ours.worst_ftf, 1.0, ours.worst_ftf, "worst rho", FAIRNESS, counts and fair),
    )
    for name, mine, theirs, by, unit, most, goal in rows:
        report(
            f"right_size: simulated {curves}, {policy}, {name}", ours=round(mine, 3), peer=round(theirs, 3),
            ratio=round(by, 4), unit=unit, goal=f"<= {most:g}" if goal else "none", ok=by <= most if goal else None,
            fairness_of_knowing=round(peer.worst_ftf, 3), p95_fairness=round(ours.p95_ftf, 3), resizes=ours.resizes,
            cpu_s=round(ours.cpu_s, 1), machine=machine(),
        )  # fmt: skip
    return all(by <= most for _, _, _, by, _, most, goal in rows if goal)


def figures(trace: Trace, policy: str, settings: Settings) -> Metrics:
    pools, nodes = cluster.parse(NODES)
    case = runner.Case(trace=trace, pools=pools, nodes=nodes, policy=load(policy), settings=settings)
    return runner.run(case).metrics


def workload(curves: str) -> Trace:
    """The jobs, a class each, at the wanted load."""
    wanted = generate.parse(
        {"jobs": str(JOBS), "gpus": str(GPUS), "load": str(LOAD), "wide": str(WIDE), "elastic": "1", "curves": curves}
    )
    trace = read(wanted)
    own = {"klass": np.arange(JOBS), "classes": tuple(trace.ids)}
    return msgspec.structs.replace(trace, submit_s=trace.submit_s * load_of(trace) / LOAD, **own)


def read(wanted: Workload) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.csv"
        with path.open("w") as file:
            plain.write(generate.rows(wanted), file)
        return readers.read(path, "csv")


def load_of(trace: Trace) -> float:
    """GPU-seconds at the sizes where jobs are fastest / GPU-seconds there are until the last arrival."""
    gpu_s = 0.0
    for row, high, work in zip(trace.curve.tolist(), trace.max_workers.tolist(), trace.work.tolist(), strict=True):
        speeds = trace.rates[0, row, : high + 1]
        size = int(np.argmax(speeds))
        gpu_s += size * work / float(speeds[size])
    return gpu_s / (GPUS * float(trace.submit_s[-1]))
