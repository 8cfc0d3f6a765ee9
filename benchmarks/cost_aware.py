"""`stretto` where starting and resizing cost something: mean completion against the best of its class.

    python benchmarks/cost_aware.py [--processes 1] [--seed 0]

Two sets of worlds, with known and with unknown lengths; the classes of policies that know as much are those of
`stretto lab field`.

- The 60 jobs of Tiresias' trace on 2x4 GPUs at 0.5, 5 and 30 s for every start and resize: at most 1.15 times the best,
  and at 30 s at most as many preemptions as jobs.
- 20 generated workloads of 200 jobs each (`stretto trace gen`): rigid, half elastic and elastic; 8 to 64 GPUs; loads of
  0.6 to 1.3; log-normal and Pareto sizes with medians of 5 minutes to an hour; costs of 0 to 30 s. The geometric mean
  of the ratios must be at most 1.05, none above 1.15. `--seed` draws 20 others of the same kinds.

One line of JSON for each case, with worst finish-time fairness and preemptions; then one for each set, and one for all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from _verdict import report
from stretto.lab.field import CLASSES
from stretto.sim import generate, runner
from stretto.sim.generate import Workload
from stretto.sim.readers import plain

SIXTY = Path(__file__).parent.parent / "tests" / "data" / "tiresias" / "60_job.csv"
MOST, USUAL, PREEMPTIONS = 1.15, 1.05, 1.0
COSTS_S = (0.0, 0.5, 2.0, 5.0, 10.0, 20.0, 30.0)
SEARCH = {"population": "24", "generations": "12"}
"""What `pollux` searches: the full search would take hours."""


class World(msgspec.Struct, frozen=True):
    """A trace, where it runs and what a start and a resize cost there."""

    set: str
    name: str
    path: Path
    format: str
    cluster: str
    cost_s: float
    lengths: str


class Figures(msgspec.Struct, frozen=True):
    """What one policy made of it."""

    mean_s: float
    fairness: float
    preemptions: int
    most_preemptions: int
    jobs: int
    resizes: int


class Verdict(msgspec.Struct, frozen=True):
    """One case, judged."""

    world: World
    ratio: float
    ok: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.processes) as pool:
        worlds = [*sixty(), *generated(Path(folder), arguments.seed)]
        pairs = [(world, name) for world in worlds for name in CLASSES[world.lengths]]
        figures = dict(zip(pairs, pool.map(simulate, *zip(*pairs, strict=True)), strict=True))
    verdicts = [judge(world, {name: figures[world, name] for name in CLASSES[world.lengths]}) for world in worlds]
    sum_up(verdicts)


def sixty() -> Iterator[World]:
    for lengths in CLASSES:
        for cost_s in (0.5, 5.0, 30.0):
            yield World("60_job", f"60_job at {cost_s:g} s", SIXTY, "tiresias", "2x4", cost_s, lengths)


def generated(folder: Path, seed: int) -> Iterator[World]:
    """Every setting in turn, each with its own period, so that they meet in many ways."""
    for i in range(20):
        wanted = Workload(
            jobs=200, gpus=(16, 32, 64, 8)[i % 4], load=(0.8, 1.0, 1.3, 0.6, 0.9)[i % 5], elastic=(0, 0.5, 1)[i % 3],
            sizes=("lognormal", "pareto")[i % 2], median_s=(1200, 300, 3600)[i // 3 % 3], wide=(0, 0.3)[i // 2 % 2],
            seed=seed + i,
        )  # fmt: skip
        path, cost_s = folder / f"{i}.csv", COSTS_S[i % len(COSTS_S)]
        with path.open("w") as file:
            plain.write(generate.rows(wanted), file)
        name = (
            f"generated {i}: {wanted.elastic:.0%} elastic, {wanted.gpus} GPUs, load {wanted.load}, "
            f"{wanted.sizes} of {wanted.median_s:g} s, {cost_s:g} s"
        )
        for lengths in CLASSES:
            yield World("generated", name, path, "csv", f"{wanted.gpus // 8}x8", cost_s, lengths)


def simulate(world: World, policy: str) -> Figures:
    settings = {"start_s": str(world.cost_s), "resize_s": str(world.cost_s), "lengths": world.lengths}
    settings |= SEARCH if policy == "pollux" else {}
    outcome = runner.run(runner.prepare(world.path, world.format, world.cluster, policy, settings))
    stops = outcome.result.preemptions
    return Figures(
        mean_s=outcome.metrics.avg_jct_s,
        fairness=outcome.metrics.worst_ftf or 0.0,
        preemptions=int(stops.sum()),
        most_preemptions=int(stops.max()),
        jobs=len(stops),
        resizes=int(outcome.result.resizes.sum()),
    )


def judge(world: World, figures: dict[str, Figures]) -> Verdict:
    ours = figures.pop("stretto")
    best = min(figures, key=lambda name: figures[name].mean_s)
    peer = figures[best]
    ratio = ours.mean_s / peer.mean_s
    few = world.set != "60_job" or world.cost_s < 30 or ours.preemptions <= PREEMPTIONS * ours.jobs
    report(
        f"cost_aware: {world.name}, lengths {world.lengths}, against {best}",
        ours=round(ours.mean_s, 1),
        peer=round(peer.mean_s, 1),
        ratio=round(ratio, 4),
        unit="s",
        goal=f"<= {MOST}",
        ok=ratio <= MOST and few,
        fairness=[round(ours.fairness, 2), round(peer.fairness, 2)],
        preemptions=[ours.preemptions, peer.preemptions],
        most_preemptions_of_a_job=ours.most_preemptions,
        resizes=[ours.resizes, peer.resizes],
    )
    return Verdict(world, ratio, ratio <= MOST and few)


def sum_up(verdicts: list[Verdict]) -> None:
    """By set and class, then all."""
    met = True
    for lengths in CLASSES:
        ratios = [v.ratio for v in verdicts if v.world.set == "generated" and v.world.lengths == lengths]
        usual = float(np.exp(np.mean(np.log(ratios))))
        met &= usual <= USUAL
        report(
            f"cost_aware: 20 generated workloads, lengths {lengths}, geometric mean",
            ours=None, peer=None, ratio=round(usual, 4), unit="times the best of its class",
            goal=f"<= {USUAL}, none above {MOST}", ok=usual <= USUAL and max(ratios) <= MOST,
            largest=round(max(ratios), 4),
        )  # fmt: skip
    missed = [f"{v.world.name}, lengths {v.world.lengths}" for v in verdicts if not v.ok]
    ratios = [v.ratio for v in verdicts]
    report(
        "cost_aware: all",
        ours=len(verdicts) - len(missed),
        peer=len(verdicts),
        ratio=round(max(ratios), 4),
        unit="cases within the goal; the largest ratio",
        goal=f"all <= {MOST}, geometric means <= {USUAL}, at most one preemption per job at 30 s on 60_job",
        ok=met and not missed,
        missed=missed,
    )


if __name__ == "__main__":
    main()
