"""The experiments behind the settings of `stretto`, on the elastic ITP traces 01, 02 and 06.

    python benchmarks/policy_sweeps.py [FOLDER] [--sweeps p,fairness,unknown,siblings] [--traces itp-01,…]

FOLDER (or STRETTO_DATA) holds the public traces, as for `stretto lab field`. Every row of a table is one set of
`--set` options, and can be had as well from `stretto sim run`. Some minutes on two processes in all.

- `p`: how far small jobs are preferred. Known lengths, resizes free, guard off; the peer is afs-l in the same run.
- `fairness`: where the guard steps in. Known lengths, 0.5 s a resize; the peer is the same without the guard.
- `unknown`: what to do about lengths nobody knows. 0.5 s a resize, on itp-01, where jobs must wait; the peer is the
  best of the other policies. Neighbouring settings of our own show how much of its result is luck.
- `siblings`: why neighbours in the queue tell about a job. Median factor between the lengths of a job and of the next
  one of its width, if that came within a minute; the peer is that between the same jobs and random ones of the width.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from _verdict import report
from stretto.core.policies.stretto import Options
from stretto.core.snapshot import GPU
from stretto.lab.field import WORLDS, World
from stretto.sim import fair, readers, runner
from stretto.sim.trace import Trace

ITP = {world.name: world for world in WORLDS if world.format == "itp"}
OFF = "1e9"
P = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
FAIRNESS = (1.3, 1.2, 1.1)
OTHERS = ("tiresias", "tiresias-gittins", "elastic-tiresias", "themis", "elastic-fifo")
VARIANTS: tuple[dict[str, str], ...] = (
    {}, {"patience": "0.1"}, {"patience": "0.2"}, {"patience": "0.5"}, {"patience": "1"}, {"fairness": "1.1"},
    {"fairness": "1.3"}, {"fairness": OFF}, {"quantum_s": "10"}, {"quantum_s": "60"},
)  # fmt: skip
CROWDED = "itp-01"
PAUSE = {"start_s": "0.5", "resize_s": "0.5"}
NEAR_BEST, GUARD_COST, FAIR, BEST_OF_CLASS = 1.005, 1.02, 1.5, 1.01


class Cell(msgspec.Struct, frozen=True):
    """One simulation."""

    world: World
    policy: str
    settings: dict[str, str]
    data: Path

    @property
    def path(self) -> Path:
        return self.data / self.world.path


class Outcome(msgspec.Struct, frozen=True):
    mean_s: float
    worst: float
    """Finish-time fairness, the largest."""
    unfair: float
    """Share of jobs more than 5 % slower than under equal sharing."""


class Lab(msgspec.Struct, frozen=True):
    """Where simulations run, and on which traces."""

    pool: Executor
    data: Path
    worlds: tuple[World, ...]

    def table(self, rows: Sequence[tuple[str, dict[str, str]]], world: World) -> list[Outcome]:
        return list(self.pool.map(simulate, [Cell(world, policy, options, self.data) for policy, options in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get("STRETTO_DATA", ""))
    parser.add_argument("--sweeps", default=",".join(SWEEPS))
    parser.add_argument("--traces", default=",".join(ITP))
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    arguments = parser.parse_args()
    names, traces = arguments.sweeps.split(","), arguments.traces.split(",")
    for given, known in ((names, SWEEPS), (traces, ITP)):
        if wrong := [name for name in given if name not in known]:
            parser.error(f"{', '.join(wrong)}: unknown; there are {', '.join(known)}")
    met = []
    files = [Path(arguments.folder) / ITP[name].path for name in {*traces, CROWDED}]
    there = bool(arguments.folder) and all(file.is_file() for file in files)
    if there:
        with ProcessPoolExecutor(arguments.processes) as pool:
            lab = Lab(pool, Path(arguments.folder), tuple(ITP[name] for name in traces))
            met = [SWEEPS[name](lab) for name in names]
    else:
        print("the ITP traces are missing: give their folder, or set STRETTO_DATA to it")
    report(
        "policy_sweeps: all",
        ours=sum(met) if there else None,
        peer=len(names),
        ratio=round(sum(met) / len(names), 4) if there else None,
        unit="sweeps that bear out the defaults",
        goal="all",
        ok=there and all(met),
    )


def sweep_p(lab: Lab) -> bool:
    values = sorted({*P, Options().p})
    free = {"start_s": "0", "resize_s": "0"}
    rows = [("afs-l", free), *(("stretto", {**free, "fairness": OFF, "p": str(p)}) for p in values)]
    found = {world.name: lab.table(rows, world) for world in lab.worlds}
    print("\np: mean completion over that of afs-l; resizes free, no guard")
    head("p", found)
    for i, p in enumerate(values, 1):
        print(f"{p:<34}" + "".join(f"{line[i].mean_s / line[0].mean_s:18.4f}" for line in found.values()))
    default = 1 + values.index(Options().p)
    pairs = [(line[default].mean_s, min(cell.mean_s for cell in line[1:])) for line in found.values()]
    ours, best = max(pairs, key=lambda pair: pair[0] / pair[1])
    afs_l = {name: round(line[default].mean_s / line[0].mean_s, 4) for name, line in found.items()}
    name = f"p = {Options().p:g} against the best p on each trace, the worst trace"
    return verdict(name, ours, best, "s", NEAR_BEST, against_afs_l=afs_l)


def sweep_fairness(lab: Lab) -> bool:
    values = sorted({*FAIRNESS, Options().fairness}, reverse=True)
    rows = [("stretto", {**PAUSE, "fairness": value}) for value in (OFF, *map(str, values))]
    found = {world.name: lab.table(rows, world) for world in lab.worlds}
    print("\nfairness: mean completion in s, worst rho; 0.5 s a resize")
    head("guard at", found)
    for i, name in enumerate(("off", *values)):
        cells = "".join(f"{line[i].mean_s:11,.0f}, {line[i].worst:5.2f}" for line in found.values())
        print(f"{name:<34}" + cells)
    default = 1 + values.index(Options().fairness)
    pairs = [(line[default].mean_s, line[0].mean_s) for line in found.values()]
    ours, off = max(pairs, key=lambda pair: pair[0] / pair[1])
    worst = max(line[default].worst for line in found.values())
    cheap = verdict(f"guard at {Options().fairness:g} against none, the worst trace", ours, off, "s", GUARD_COST)
    held = verdict(f"guard at {Options().fairness:g}, worst rho of all traces", worst, 1.0, "worst rho", FAIR)
    return cheap and held


def sweep_unknown(lab: Lab) -> bool:
    world = ITP[CROWDED]
    unknown = {**PAUSE, "lengths": "unknown"}
    rows = [*((name, unknown) for name in OTHERS), *(("stretto", unknown | more) for more in VARIANTS)]
    found = lab.table(rows, world)
    case = runner.prepare(lab.data / world.path, world.format, world.cluster, "stretto", {})
    equal_s = float(np.mean(fair.fair_finish(case.seen, case.gpus * GPU) - case.seen.submit_s))
    print(f"\nunknown lengths on {CROWDED}; 0.5 s a resize")
    print(f"{'policy':34}{'mean s':>10}{'worst rho':>11}{'rho > 1.05':>12}")
    titles = [*OTHERS, *(" ".join(["stretto", *map("=".join, more.items())]).replace(OFF, "off") for more in VARIANTS)]
    for title, cell in zip(titles, found, strict=True):
        print(f"{title:34}{cell.mean_s:10,.0f}{cell.worst:11.2f}{100 * cell.unfair:10.0f} %")
    print(f"{'equal shares, for free':34}{equal_s:10,.0f}{1:11.2f}{0:10} %")
    ours, best = found[len(OTHERS)].mean_s, min(cell.mean_s for cell in found[: len(OTHERS)])
    return verdict("unknown lengths, against the best of the others", ours, best, "s", BEST_OF_CLASS)


def sweep_siblings(lab: Lab) -> bool:
    print("\nsiblings: median factor between the lengths of two jobs of one width")
    print(f"{'trace':34}{'pairs':>10}{'neighbours':>12}{'random':>10}{'most jobs at once, equal shares':>34}")
    pairs = []
    for world in lab.worlds:
        case = runner.prepare(lab.data / world.path, world.format, world.cluster, "stretto", {})
        count, near, far = neighbours(readers.read(lab.data / world.path, world.format, {}))
        pairs.append((near, far))
        print(f"{world.name:34}{count:10,}{near:12.3f}{far:10.2f}{crowd(case):34}")
    near, far = max(pairs, key=lambda pair: pair[0] / pair[1])
    return verdict("neighbours against random pairs, the worst trace", near, far, "factor between lengths", 1.0)


SWEEPS: dict[str, Callable[[Lab], bool]] = {
    "p": sweep_p,
    "fairness": sweep_fairness,
    "unknown": sweep_unknown,
    "siblings": sweep_siblings,
}


def simulate(cell: Cell) -> Outcome:
    case = runner.prepare(cell.path, cell.world.format, cell.world.cluster, cell.policy, cell.settings)
    found = runner.run(case).metrics
    return Outcome(float(found.avg_jct_s or 0), float(found.worst_ftf or 0), float(found.unfair_share or 0))


def neighbours(trace: Trace, within_s: float = 60.0) -> tuple[int, float, float]:
    """How many jobs have the next of their width so close; the median factor to its length, and to a random one's."""
    random = np.random.default_rng(0)
    near: list[float] = []
    far: list[float] = []
    for width in np.unique(trace.requested):
        of_width = np.flatnonzero(trace.requested == width)
        length = np.log(trace.duration_s[of_width])
        close = np.flatnonzero(np.diff(trace.submit_s[of_width]) <= within_s)
        near += np.abs(length[close + 1] - length[close]).tolist()
        far += np.abs(random.choice(length, len(close)) - length[close]).tolist()
    return len(near), math.exp(np.median(near)), math.exp(np.median(far))


def crowd(case: runner.Case) -> int:
    """The most jobs there are at once under equal sharing."""
    seen = case.seen
    moments = np.concatenate((seen.submit_s, fair.fair_finish(seen, case.gpus * GPU)))
    steps = np.repeat((1, -1), len(seen))
    return int(np.cumsum(steps[np.lexsort((steps, moments))]).max())


def head(title: str, found: dict[str, list[Outcome]]) -> None:
    print(f"{title:34}" + "".join(f"{name:>18}" for name in found))


def verdict(name: str, ours: float, peer: float, unit: str, most: float, **more: object) -> bool:
    ok = ours / peer <= most
    report(
        f"policy_sweeps: {name}",
        ours=round(ours, 3),
        peer=round(peer, 3),
        ratio=round(ours / peer, 4),
        unit=unit,
        goal=f"<= {most:g}",
        ok=ok,
        **more,
    )
    return ok


if __name__ == "__main__":
    main()
