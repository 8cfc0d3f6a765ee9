"""Does a job get the size at which it is fastest, and what does finding it cost?

    python benchmarks/right_size.py [paced] [together] [simulated] [cpu] [gpu] [--rounds 3] [--only KIND]

*paced* (two cores suffice): jobs whose step takes a known time at every size, up to 8: one that scales, one that is
fastest alone, one whose best size is in the middle, one whose speed changes half-way. *cpu* (16 cores): two real ones
that compute. *gpu* (one GPU): a small GPT at quarter shares. Each runs alone on a fresh data folder with nothing
learned, from one worker to as many as are measured, for at least a minute and 1,500 steps at its best size (gpu: 1,000
steps).

The baseline is its steps × the step time at each fixed size, measured in the same server for at least 5 s per size
before *and* after the run. Time counts from the first to the last step. A round counts if the best fixed size takes the
same before and after within 5 %; the median of the rounds must be at most 1.10 × the best fixed size.

*together*: three paced jobs at once on six slots. All assignments of 1, 2 or 4 workers that fit are simulated with the
measured curves, the best five are played; mean completion of ours must be at most 1.10 × the best of those.

*simulated*: 1,000 jobs of a class each, load 0.9, curves that fall or peak in the middle, 10 % noise, resizes of 0.5 s:
the mean must be within 1.05 of knowing the curves, the worst finish-time fairness at most 1.5.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from _measure import machine
from _server import Server, serving
from _verdict import report

Table = dict[int, list[float]]
"""Seconds of a step by number of workers, one for each half."""

SCRIPTS = Path(__file__).parent / "scripts"
MOST = 8
LEAST_S = 5.0
GOAL, DRIFT = 1.10, 0.05
WAIT_S = 900.0


@dataclass(frozen=True)
class Kind:
    """A job, in one or two halves of different speed."""

    name: str
    script: str
    steps: int
    """At least."""
    halves: tuple[tuple[str, ...], ...]
    """The script's arguments that make its speed."""
    sizes: tuple[int, ...] = tuple(range(1, MOST + 1))
    resources: dict[str, object] = field(default_factory=dict)
    least_s: float = 62.0
    """At its best size it has more steps if these take less."""

    def command(self, steps: int, marks: Path, half: int | None) -> list[str]:
        """All of it, or one of its halves alone."""
        speed = list(self.halves[half or 0])
        if half is None and len(self.halves) > 1:
            speed += ["--then", self.halves[1][1]]
        return [sys.executable, str(SCRIPTS / self.script), "--steps", str(steps), "--marks", str(marks), *speed]

    def foreseen_s(self, size: int, half: int) -> float | None:
        """The seconds of a step, if its arguments say them."""
        option, value = self.halves[half]
        return float(value.split(",")[size - 1]) / 1000 if option == "--step-ms" else None

    def steps_of(self, table: Table) -> int:
        best_s = min(map(statistics.mean, table.values()))
        return max(self.steps, math.ceil(self.least_s / best_s))


def paced(name: str, *tables: str, steps: int = 1600) -> Kind:
    return Kind(name, "paced_curve.py", steps, tuple(("--step-ms", table) for table in tables))


SCALES = "320,160,107,80,64,53.3,45.7,40"
ALONE = "40,60,80,100,120,140,160,180"
MIDDLE = "110,62,48,40,46,52,60,70"
PACED = (
    paced("scales", SCALES),
    paced("alone", ALONE),
    paced("middle", MIDDLE),
    paced("changes", MIDDLE, ALONE),
)
CPU = (
    Kind("convolution", "busy.py", 1500, (("--model", "convolution"),), sizes=(1, 2, 4, 8)),
    Kind("small", "busy.py", 1500, (("--model", "small"),), sizes=(1, 2, 4, 8, 16)),
)
GPU = (Kind("gpt", "busy.py", 1000, (("--model", "gpt"),), sizes=(1, 2, 3, 4), resources={"gpu": 0.25}, least_s=0.0),)


class Bench:
    """Jobs in one server."""

    guesses: ClassVar[dict[tuple[str, int, int], float]] = {}
    """Seconds of a step, as last measured: what is measured again need not be tried first."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._client, self._folder = server.client(), folder
        self._count = 0

    def submit(self, kind: Kind, steps: int, low: int, high: int, half: int | None = None) -> tuple[int, Path]:
        self._count += 1
        marks = self._folder / f"marks-{self._count}"
        sizes = {"elastic": {"min": low, "max": high}, "resources": kind.resources}
        # Nothing is learned from one run for the next: each is a class of its own.
        name = f"{kind.name}-{self._count}"
        job = self._client.submit({"name": name, "run": kind.command(steps, marks, half), **sizes})
        return job.number, marks

    def wait(self, number: int) -> None:
        job = self._client.wait(number, timeout_s=WAIT_S)
        if job.phase != "succeeded":
            sys.exit(f"{job.name} has {job.phase}: {job.message}")

    def fixed_s(self, kind: Kind, size: int, half: int) -> float:
        """The seconds of a step at a fixed size, over at least five seconds."""
        guess_s = self.guesses.get((kind.name, size, half)) or kind.foreseen_s(size, half)
        steps = 30 if guess_s is None else round(1.05 * LEAST_S / guess_s) + 2
        while True:
            number, marks = self.submit(kind, steps, size, size, half)
            self.wait(number)
            first, last = span(marks)
            step_s = (last - first) / (steps - 1)
            self.guesses[kind.name, size, half] = step_s
            if last - first >= LEAST_S:
                return step_s
            steps = round(1.1 * LEAST_S / step_s) + 2

    def table(self, kind: Kind) -> Table:
        return {size: [self.fixed_s(kind, size, half) for half in range(len(kind.halves))] for size in kind.sizes}

    def ours_s(self, kind: Kind, steps: int) -> float:
        number, marks = self.submit(kind, steps, 1, max(kind.sizes))
        self.wait(number)
        first, last = span(marks)
        return (last - first) * steps / (steps - 1)


def span(marks: Path) -> tuple[float, float]:
    times = [float(line) for line in marks.read_text().split()]
    return min(times), max(times)


def alone(kinds: tuple[Kind, ...], options: tuple[str, ...], rounds: int, where: str) -> bool:
    """Each kind by itself; whether all goals are met."""
    met = True
    for kind in kinds:
        ratios, drifts, unmeasured = [], [], 0
        tried = 0
        while len(ratios) < rounds and tried < 2 * rounds:
            tried += 1
            with tempfile.TemporaryDirectory() as folder, serving(Path(folder), *options) as server:
                bench = Bench(server, Path(folder))
                before = bench.table(kind)
                steps = kind.steps_of(before)
                ours = bench.ours_s(kind, steps)
                after = bench.table(kind)
            mean = {size: steps * statistics.mean(before[size] + after[size]) for size in before}
            best = min(mean, key=lambda size: mean[size])
            drift = statistics.mean(after[best]) / statistics.mean(before[best])
            line = {"kind": kind.name, "steps": steps, "ours_s": ours, "fixed_s": mean, "best": best, "itself": drift}
            print(json.dumps(line), flush=True)
            if abs(drift - 1) > DRIFT:
                unmeasured += 1
                continue
            ratios.append(ours / mean[best])
            drifts.append(drift)
        ratio = statistics.median(ratios) if len(ratios) >= rounds else None
        ok = ratio is not None and ratio <= GOAL
        met = met and ok
        report(
            f"right_size: {where}, {kind.name}", ours=ratio, peer=1.0, ratio=ratio, unit="× the best fixed size",
            goal=f"<= {GOAL}", ok=ok, rounds=ratios, itself=drifts, rounds_not_measured=unmeasured, machine=machine(),
        )  # fmt: skip
    return met


# Several at once.


def together(rounds: int) -> bool:
    """Three jobs on six slots: ours beside the best of all fixed assignments."""
    kinds = tuple(Kind(kind.name, kind.script, 500, kind.halves[:1], sizes=(1, 2, 4)) for kind in PACED[:3])
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--cpu", "--slots", "6") as server:
            bench = Bench(server, Path(folder))
            tables = [totals(bench.table(kind), kind.steps) for kind in kinds]
            ours = played(bench, kinds, [(1, 4)] * len(kinds))
            fixed = list(itertools.product((1, 2, 4), repeat=len(kinds)))
            foreseen = sorted(fixed, key=lambda sizes: simulated_mean(tables, sizes, 6))[:5]
            best = min(played(bench, kinds, [(n, n) for n in sizes]) for sizes in foreseen)
        print(json.dumps({"together": ours, "best_fixed": best, "tried": foreseen}), flush=True)
        ratios.append(ours / best)
    ratio = statistics.median(ratios)
    report(
        "right_size: together", ours=ratio, peer=1.0, ratio=ratio, unit="× the best fixed assignment",
        goal=f"<= {GOAL}", ok=ratio <= GOAL, rounds=ratios, machine=machine(),
    )  # fmt: skip
    return ratio <= GOAL


def totals(table: Table, steps: int) -> dict[int, float]:
    return {size: steps * statistics.mean(halves) for size, halves in table.items()}


def simulated_mean(tables: list[dict[int, float]], sizes: tuple[int, ...], slots: int) -> float:
    """Mean completion if each runs at its size as soon as it fits, in order."""
    free, now_s, ends = slots, 0.0, []
    running: list[tuple[float, int]] = []
    for table, size in zip(tables, sizes, strict=True):
        while free < size:
            now_s, gone = min(running)
            running.remove((now_s, gone))
            free += gone
        running.append((now_s + table[size], size))
        ends.append(now_s + table[size])
        free -= size
    return statistics.mean(ends)


def played(bench: Bench, kinds: tuple[Kind, ...], sizes: list[tuple[int, int]]) -> float:
    """Mean completion of all, submitted at once."""
    began_s = time.monotonic()
    jobs = [bench.submit(kind, kind.steps, low, high) for kind, (low, high) in zip(kinds, sizes, strict=True)]
    for number, _ in jobs:
        bench.wait(number)
    return statistics.mean(span(marks)[1] - began_s for _, marks in jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["paced", "together", "simulated"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="of the kinds, the one of this name")
    arguments = parser.parse_args()
    pick = lambda kinds: tuple(kind for kind in kinds if arguments.only in ("", kind.name))  # noqa: E731
    met = True
    for part in arguments.parts:
        if part == "paced":
            met &= alone(pick(PACED), ("--cpu", "--slots", str(MOST)), arguments.rounds, "paced")
        elif part == "cpu":
            met &= alone(pick(CPU), ("--cpu",), arguments.rounds, "sixteen cores")
        elif part == "gpu":
            met &= alone(pick(GPU), (), arguments.rounds, "one GPU in shares")
        elif part == "together":
            met &= together(arguments.rounds)
        elif part == "simulated":
            from _learned import simulated

            met &= simulated()
        else:
            parser.error(f"{part!r} is no part of this benchmark")
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
