"""Does the live system do what the simulator says? The same jobs under six policies, live and simulated.

    python benchmarks/fidelity.py [--busy] [--jobs 32] [--policies fifo,srtf,tiresias,afs-l,gavel,stretto]

Paced jobs of three kinds (real processes, reductions and resizes; a step takes a known time at every size) come over
about a minute to eight slots, at more than 1.3 times what these can do. Curves and the costs of starts, ends and
resizes come from a calibration before, in the same server; it also teaches the server what it learns of classes. With
`--busy` the jobs compute, on as many slots as there are cores.

Mean completion and makespan, live and simulated, must agree within 5 % (busy: within max(5 %, twice the difference of
two live runs of one policy)), and the order of the policies must be the same where live means differ by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from _measure import machine
from _server import Server, serving
from _verdict import report
from stretto import plugins
from stretto.sim import cluster, engine
from stretto.sim.trace import ELASTIC, Trace
from stretto.sim.world import Settings

SCRIPTS = Path(__file__).parent / "scripts"
SIZES = (1, 2, 4)
GOAL, APART = 0.05, 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    "tiresias": {"queues": "12"},
    "gavel": {"round_s": 3.0},
}
WAIT_S = 600.0


@dataclass(frozen=True)
class Kind:
    name: str
    command: tuple[str, ...]
    step_s: float
    """About so long takes a step on one worker."""


PACED = (
    Kind("linear", ("paced_curve.py", "--step-ms", "200,100,66.7,50"), 0.2),
    Kind("bent", ("paced_curve.py", "--step-ms", "120,75,62,58"), 0.12),
    Kind("flat", ("paced_curve.py", "--step-ms", "60,55,54,53"), 0.06),
)
BUSY = (
    Kind("convolution", ("busy.py", "--model", "convolution"), 0.15),
    Kind("small", ("busy.py", "--model", "small"), 0.004),
)


@dataclass(frozen=True)
class Planned:
    """A job of the workload."""

    kind: int
    at_s: float
    steps: int
    workers: int


@dataclass(frozen=True)
class Costs:
    """What the calibration found: seconds of a step [kind][size], of a start with an end, and of a resize."""

    step_s: list[dict[int, float]]
    start_s: float
    resize_s: float


class Bench:
    def __init__(self, server: Server, kinds: Sequence[Kind], folder: Path) -> None:
        self.client, self._kinds, self._folder = server.client(), kinds, folder
        self._count = 0

    def submit(self, kind: int, steps: int, low: int, high: int, workers: int) -> tuple[int, Path]:
        """The class is the command, which is the same for all of a kind."""
        self._count += 1
        marks = self._folder / f"marks-{self._count}"
        script, *arguments = self._kinds[kind].command
        job = self.client.submit(
            {
                "run": [sys.executable, str(SCRIPTS / script), *arguments],
                "env": {"STEPS": str(steps), "MARKS": str(marks)},
                "hyperparameters": {"steps": steps},
                "workers": workers,
                "elastic": {"min": low, "max": high, "explore": False},
            }
        )
        return job.number, marks

    def ended(self, number: int) -> Any:
        job = self.client.wait(number, timeout_s=WAIT_S)
        if job.phase != "succeeded":
            sys.exit(f"{job.name} has {job.phase}: {job.message}")
        return job


def span(marks: Path) -> tuple[float, float]:
    times = [float(line) for line in marks.read_text().split()]
    return min(times), max(times)


# Calibration.


def calibrate(bench: Bench, kinds: Sequence[Kind]) -> Costs:
    step_s: list[dict[int, float]] = []
    extra = []
    for k, kind in enumerate(kinds):
        found = {}
        for size in SIZES:
            steps = max(20, round(3.0 * (1 + size / 4) / kind.step_s))
            number, marks = bench.submit(k, steps, size, size, size)
            job = bench.ended(number)
            first, last = span(marks)
            found[size] = (last - first) / (steps - 1)
            extra.append(job.ran_s - steps * found[size])
        step_s.append(found)
    return Costs(step_s, statistics.median(extra), _resize_s(bench, step_s[0]))


def _resize_s(bench: Bench, step_s: dict[int, float]) -> float:
    """What a resize costs beyond the steps: a job is scaled up and down, one resize after the other."""
    steps = 160
    number, marks = bench.submit(0, steps, 1, 1, 1)
    done, had, moments = 0, 1, []
    for size in (2, 4, 2, 1):
        target = done + steps // 6
        while (job := bench.client.job(number)).steps < target and not job.ended:
            time.sleep(0.02)
        bench.client.scale(number, size, size)
        moments.append((job.steps, had))
        done, had = job.steps, size
    bench.ended(number)
    first, last = span(marks)
    ideal, before = 0.0, 0
    for at, size in [*moments, (steps, had)]:
        ideal += (at - before) * step_s[size]
        before = at
    return max(0.0, (last - first - ideal) / 4)


# The workload.


def workload(kinds: Sequence[Kind], jobs: int, slots: int, costs: Costs, seed: int = 7) -> list[Planned]:
    """Short and long ones, at a load of 1.4."""
    random = np.random.default_rng(seed)
    planned, area = [], 0.0
    for _ in range(jobs):
        kind = int(random.integers(len(kinds)))
        workers = int(random.choice(SIZES))
        seconds = float(np.clip(random.lognormal(1.6, 0.7), 2.0, 20.0))
        step_s = costs.step_s[kind][workers]
        planned.append(Planned(kind, 0.0, max(5, round(seconds / step_s)), workers))
        area += workers * (seconds + costs.start_s)
    span_s = area / slots / 1.4
    at = np.sort(random.uniform(0.0, span_s, jobs))
    return [Planned(one.kind, float(s), one.steps, one.workers) for one, s in zip(planned, at, strict=True)]


def live(bench: Bench, planned: Sequence[Planned], policy: str) -> tuple[float, float]:
    bench.client.set_policy(policy, OPTIONS.get(policy, {}))
    began_s = time.monotonic()
    numbers = []
    for one in planned:
        time.sleep(max(0.0, began_s + one.at_s - time.monotonic()))
        numbers.append(bench.submit(one.kind, one.steps, 1, max(SIZES), one.workers)[0])
    jobs = [bench.ended(number) for number in numbers]
    times = [job.ended_s - job.submitted_s for job in jobs]
    return statistics.mean(times), max(job.ended_s for job in jobs) - jobs[0].submitted_s


def simulated(planned: Sequence[Planned], policy: str, costs: Costs, slots: int) -> tuple[float, float]:
    most = max(SIZES)
    table = np.zeros((1, len(costs.step_s), most + 1))
    for k, known in enumerate(costs.step_s):
        sizes, rates = list(known), [1 / known[size] for size in known]
        table[0, k, 1:] = np.interp(np.arange(1, most + 1), sizes, rates)
    count = len(planned)
    trace = Trace.build(
        "fidelity", [f"job-{i:03}" for i in range(count)], [one.at_s for one in planned],
        [one.workers for one in planned], [1.0] * count, work=[float(one.steps) for one in planned],
        curve=[one.kind for one in planned], rates=table, min_workers=[1] * count, max_workers=[most] * count,
        classes=[str(one.kind) for one in planned], level=[ELASTIC] * count,
    )  # fmt: skip
    world = Settings(start_s=costs.start_s, resize_s=costs.resize_s, hysteresis=True)
    options = {name: str(value) for name, value in OPTIONS.get(policy, {}).items()}
    result = engine.simulate(trace, *cluster.uniform(1, slots), plugins.find(policy, options), world)
    return float(np.mean(result.finish_s - trace.submit_s)), float(result.finish_s.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--policies", default="fifo,srtf,tiresias,afs-l,gavel,stretto")
    arguments = parser.parse_args()
    kinds = BUSY if arguments.busy else PACED
    slots = len(os.sched_getaffinity(0)) if arguments.busy else 8
    names = arguments.policies.split(",")
    found: dict[str, tuple[float, float, float, float]] = {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--cpu", "--slots", str(slots)) as server:
        bench = Bench(server, kinds, Path(folder))
        bench.client.set_policy("fifo", {})
        costs = calibrate(bench, kinds)
        print(json.dumps({"step_s": costs.step_s, "start_s": costs.start_s, "resize_s": costs.resize_s}), flush=True)
        planned = workload(kinds, arguments.jobs, slots, costs)
        for name in names:
            found[name] = (*live(bench, planned, name), *simulated(planned, name, costs, slots))
            print(json.dumps({"policy": name, "live": found[name][:2], "simulated": found[name][2:]}), flush=True)
        noise = 0.0
        if arguments.busy:
            again = live(bench, planned, names[0])
            noise = 2 * abs(again[0] / found[names[0]][0] - 1)
    _judge(found, max(GOAL, noise))


def _judge(found: dict[str, tuple[float, float, float, float]], goal: float) -> None:
    worst = 0.0
    for name, (mean, end, foreseen, foreseen_end) in found.items():
        off = max(abs(foreseen / mean - 1), abs(foreseen_end / end - 1))
        worst = max(worst, off)
        report(
            f"fidelity: {name}", ours=foreseen, peer=mean, ratio=foreseen / mean, unit="s mean completion",
            goal=f"within {goal:.0%}", ok=off <= goal, makespan=foreseen_end / end,
        )  # fmt: skip
    means = {name: row[0] for name, row in found.items()}
    wrong = [
        (a, b) for a in found for b in found
        if means[a] < (1 - APART) * means[b] and found[a][2] >= found[b][2]
    ]  # fmt: skip
    spread = max(means.values()) / min(means.values()) - 1
    report(
        "fidelity", ours=worst, peer=None, ratio=None, unit="largest difference", goal=f"<= {goal:.0%}, same order",
        ok=worst <= goal and not wrong and spread >= 0.2, wrong_order=wrong, best_and_worst_apart=spread,
        machine=machine(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
