"""Does the live system do what the simulator says? The same jobs under six policies, live and simulated.

    python benchmarks/fidelity.py [--busy] [--jobs 40] [--policies fifo,srtf,tiresias,afs-l,gavel,stretto]

Paced jobs of three kinds (real processes, reductions and resizes; a step takes a known time at every size) come over
some minutes to eight slots, at more than 1.3 times what these can do. They run for 9 to 90 s: of shorter ones, under
policies that stop jobs, the simulated means themselves change by a fifth if a start takes 0.1 s more. Curves and the
costs of starts, ends and resizes come from a calibration before, in the same server; it also teaches the server what it
learns of classes, so no sizes are explored (`explore: false`). With `--busy` the jobs compute, on as many slots as
there are cores; what a full machine does to steps and starts is calibrated, too, since at such a load it is full.

Mean completion and makespan, live and simulated, must agree within 5 % (busy: within max(5 %, twice the difference of
two live runs of one policy)), and the order of the policies must be the same where live means differ by more than 5 %
(busy: by more than two live runs of one policy do).
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from _measure import machine
from _server import Server, serving, until
from _verdict import report
from stretto import plugins
from stretto.sim import cluster, engine
from stretto.sim.trace import ELASTIC, Trace
from stretto.sim.world import Settings

SCRIPTS = Path(__file__).parent / "scripts"
SIZES = (1, 2, 4)
GOAL, APART = 0.05, 0.05
DEMOTED = 1 / 3
"""Of the jobs, by the limit of the first queue of tiresias."""
ROUND_S = 9.0
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
    """What the calibration found: seconds of a step [kind][size], of a start with an end, until newcomers take part,
    until leavers have gone, and of a resize."""

    step_s: list[dict[int, float]]
    start_s: float
    join_s: float = 0.0
    leave_s: float = 0.0
    resize_s: float = 0.0
    contention: float = 0.0
    """How much slower others make a step, if they hold the whole machine."""


class Run(NamedTuple):
    """All jobs under one policy."""

    mean_s: float
    """From submission to end."""
    makespan_s: float
    starts: int
    resizes: int
    slot_s: float
    """Slot-seconds held."""


class Bench:
    def __init__(self, server: Server, kinds: Sequence[Kind], folder: Path) -> None:
        self.client, self._kinds, self._folder = server.client(), kinds, folder
        self._count = 0

    def submit(self, kind: int, steps: int, low: int, high: int, workers: int) -> tuple[int, Path]:
        marks = self._folder / f"marks-{self._count}"
        return self._submit(kind, steps, (low, high), workers, {"MARKS": str(marks)}), marks

    def traced(self, kind: int, steps: int) -> tuple[int, Path]:
        """A job that writes down every step."""
        every_step = self._folder / f"steps-{self._count}"
        return self._submit(kind, steps, (1, 1), 1, {"EVERY_STEP": str(every_step)}), every_step

    def _submit(self, kind: int, steps: int, sizes: tuple[int, int], workers: int, env: dict[str, str]) -> int:
        """The class is the command, which is the same for all of a kind."""
        self._count += 1
        script, *arguments = self._kinds[kind].command
        job = self.client.submit(
            {
                "run": [sys.executable, str(SCRIPTS / script), *arguments],
                "env": {"STEPS": str(steps), **env},
                "hyperparameters": {"steps": steps},
                "workers": workers,
                "elastic": {"min": sizes[0], "max": sizes[1], "explore": False},
            }
        )
        return job.number

    def ended(self, number: int) -> Any:
        job = self.client.wait(number, timeout_s=WAIT_S)
        if job.phase != "succeeded":
            sys.exit(f"{job.name} has {job.phase}: {job.message}")
        return job


def span(marks: Path) -> tuple[float, float]:
    times = [float(line) for line in marks.read_text().split()]
    return min(times), max(times)


# Calibration.


def calibrate(bench: Bench, kinds: Sequence[Kind], crowd: int = 0) -> Costs:
    """With a `crowd`, also what so many jobs that compute beside it do to the steps of a worker, and to its start."""
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
    changes = _changes(bench, step_s[0])
    if not crowd:
        return Costs(step_s, statistics.median(extra), *changes)
    slower, start_s = _beside(bench, kinds, step_s, crowd)
    return Costs(step_s, start_s, *changes, max(0.0, slower) * (crowd + 1) / crowd)


def _beside(bench: Bench, kinds: Sequence[Kind], step_s: list[dict[int, float]], crowd: int) -> tuple[float, float]:
    """How much longer a step of one worker takes beside a crowd of all kinds, and its job beside its steps."""
    others = [bench.submit(i % len(kinds), 10**7, 1, 1, 1)[0] for i in range(crowd)]
    for number in others:
        _reaches(bench, number, 10)
    slower, extra = [], []
    for k, kind in enumerate(kinds):
        for _ in range(2):
            steps = max(20, round(4.0 / kind.step_s))
            number, marks = bench.submit(k, steps, 1, 1, 1)
            job = bench.ended(number)
            first, last = span(marks)
            found_s = (last - first) / (steps - 1)
            slower.append(found_s / step_s[k][1] - 1)
            extra.append(job.ran_s - steps * found_s)
    for number in others:
        bench.client.cancel(number)
    for number in others:
        until(lambda number=number: not bench.client.job(number).workers, "the end of the crowd")
    return statistics.mean(slower), statistics.median(extra)


def _changes(bench: Bench, step_s: dict[int, float]) -> tuple[float, float, float]:
    """A job is scaled up and down, one resize after the other, then suspended and resumed: seconds until newcomers take
    part, until leavers have gone, and without a step."""
    number, every_step = bench.traced(0, 400)
    _reaches(bench, number, 10)
    joins, leaves, had = [], [], 1
    for size in (2, 4, 2, 4, 1, 4, 1):
        asked_s = time.monotonic()
        bench.client.scale(number, size, size)
        first_s = until(lambda since_s=asked_s, n=size: _first_at(every_step, since_s, n), "the new size", every_s=0.02)
        if size > had:
            joins.append(first_s - step_s[size] - asked_s)
        else:
            until(lambda n=size: len(bench.client.job(number).workers) == n, "the end of leavers")
            leaves.append(time.monotonic() - asked_s)
        had = size
    asked_s = time.monotonic()
    bench.client.suspend(number)
    until(lambda: not bench.client.job(number).workers, "its end")
    leaves.append(time.monotonic() - asked_s)
    bench.client.resume(number)
    job = bench.ended(number)
    return statistics.median(joins), statistics.median(leaves), job["paused_s"] / job["resizes"]


def _reaches(bench: Bench, number: int, steps: int) -> None:
    until(lambda: bench.client.job(number).steps >= steps, "its first steps", every_s=0.02)


def _first_at(every_step: Path, since_s: float, size: int) -> float:
    """When the first step on so many workers was done; 0: none was."""
    lines = every_step.read_text().splitlines() if every_step.exists() else []
    for line in lines:
        at_s, on = line.split()
        if float(at_s) > since_s and int(on) == size:
            return float(at_s)
    return 0.0


# The workload.


def workload(kinds: Sequence[Kind], jobs: int, slots: int, costs: Costs, seed: int = 7) -> list[Planned]:
    """Short and long ones, at a load of 1.4."""
    random = np.random.default_rng(seed)
    planned, area = [], 0.0
    for _ in range(jobs):
        kind = int(random.integers(len(kinds)))
        workers = int(random.choice(SIZES))
        seconds = float(np.clip(random.lognormal(3.1, 0.7), 9.0, 90.0))
        step_s = costs.step_s[kind][workers]
        planned.append(Planned(kind, 0.0, max(5, round(seconds / step_s)), workers))
        area += workers * (seconds + costs.start_s)
    span_s = area / slots / 1.4
    at = np.sort(random.uniform(0.0, span_s, jobs))
    return [Planned(one.kind, float(s), one.steps, one.workers) for one, s in zip(planned, at, strict=True)]


def options_of(policy: str, planned: Sequence[Planned], costs: Costs) -> dict[str, Any]:
    """Tiresias' limit lets a part of the jobs be demoted, gavel's rounds are some seconds."""
    service = [one.workers * one.steps * costs.step_s[one.kind][one.workers] for one in planned]
    given = {"tiresias": {"queues": f"{np.quantile(service, 1 - DEMOTED):.1f}"}, "gavel": {"round_s": ROUND_S}}
    return given.get(policy, {})


def live(bench: Bench, planned: Sequence[Planned], policy: str, options: dict[str, Any]) -> Run:
    bench.client.set_policy(policy, options)
    began_s = time.monotonic()
    numbers = []
    for one in planned:
        time.sleep(max(0.0, began_s + one.at_s - time.monotonic()))
        numbers.append(bench.submit(one.kind, one.steps, 1, max(SIZES), one.workers)[0])
    jobs = [bench.ended(number) for number in numbers]
    return Run(
        statistics.mean(job.ended_s - job.submitted_s for job in jobs),
        max(job.ended_s for job in jobs) - jobs[0].submitted_s,
        sum(job["starts"] for job in jobs),
        sum(job["resizes"] for job in jobs),
        sum(job["device_s"] for job in jobs),
    )


def simulated(planned: Sequence[Planned], policy: str, options: dict[str, Any], costs: Costs, slots: int) -> Run:
    most = max(SIZES)
    table = np.zeros((1, len(costs.step_s), most + 1))
    for k, known in enumerate(costs.step_s):
        sizes, rates = list(known), [1 / known[size] for size in known]
        table[0, k, 1:] = np.interp(np.arange(1, most + 1), sizes, rates)
    count = len(planned)
    as_asked_s = [one.steps * costs.step_s[one.kind][one.workers] for one in planned]
    trace = Trace.build(
        "fidelity", [f"job-{i:03}" for i in range(count)], [one.at_s for one in planned],
        [one.workers for one in planned], as_asked_s, work=[float(one.steps) for one in planned],
        curve=[one.kind for one in planned], rates=table, min_workers=[1] * count, max_workers=[most] * count,
        classes=[str(one.kind) for one in planned], level=[ELASTIC] * count,
    )  # fmt: skip
    world = Settings(
        start_s=costs.start_s, resize_s=costs.resize_s, join_s=costs.join_s, leave_s=costs.leave_s,
        contention=costs.contention, hysteresis=True,
    )  # fmt: skip
    chosen = plugins.find(policy, {name: str(value) for name, value in options.items()})
    result = engine.simulate(trace, *cluster.uniform(1, slots), chosen, world)
    return Run(
        float(np.mean(result.finish_s - trace.submit_s)),
        float(result.finish_s.max() - trace.submit_s[0]),
        count + int(result.preemptions.sum()),
        int(result.resizes.sum()),
        float(result.gpu_s.sum()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--policies", default="fifo,srtf,tiresias,afs-l,gavel,stretto")
    arguments = parser.parse_args()
    kinds = BUSY if arguments.busy else PACED
    slots = max(len(os.sched_getaffinity(0)), max(SIZES)) if arguments.busy else 8
    names = arguments.policies.split(",")
    found: dict[str, tuple[Run, Run]] = {}
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--cpu", "--slots", str(slots)) as server:
        bench = Bench(server, kinds, Path(folder))
        bench.client.set_policy("fifo", {})
        costs = calibrate(bench, kinds, slots - 1 if arguments.busy else 0)
        print(json.dumps(asdict(costs)), flush=True)
        planned = workload(kinds, arguments.jobs, slots, costs)
        for name in names:
            options = options_of(name, planned, costs)
            found[name] = live(bench, planned, name, options), simulated(planned, name, options, costs, slots)
            played, foreseen = (run._asdict() for run in found[name])
            print(json.dumps({"policy": name, "live": played, "simulated": foreseen}), flush=True)
        noise = 0.0
        if arguments.busy:
            again = live(bench, planned, names[0], options_of(names[0], planned, costs))
            noise = 2 * abs(again.mean_s / found[names[0]][0].mean_s - 1)
    _judge(found, max(GOAL, noise), max(APART, noise / 2))


def _judge(found: dict[str, tuple[Run, Run]], goal: float, apart: float) -> None:
    worst = 0.0
    for name, (played, foreseen) in found.items():
        mean, makespan = foreseen.mean_s / played.mean_s, foreseen.makespan_s / played.makespan_s
        off = max(abs(mean - 1), abs(makespan - 1))
        worst = max(worst, off)
        report(
            f"fidelity: {name}", ours=foreseen.mean_s, peer=played.mean_s, ratio=mean, unit="s mean completion",
            goal=f"within {goal:.0%}", ok=off <= goal, makespan=makespan,
        )  # fmt: skip
    means = {name: played.mean_s for name, (played, _) in found.items()}
    wrong = [
        (a, b) for a in found for b in found
        if means[a] < (1 - apart) * means[b] and found[a][1].mean_s >= found[b][1].mean_s
    ]  # fmt: skip
    spread = max(means.values()) / min(means.values()) - 1
    report(
        "fidelity", ours=worst, peer=None, ratio=None, unit="largest difference", goal=f"<= {goal:.0%}, same order",
        ok=worst <= goal and not wrong and spread >= 0.2, wrong_order=wrong, best_and_worst_apart=spread,
        machine=machine(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
