"""Every goal of `stretto` against the field, on nine public traces: which are met, and by how much.

    python benchmarks/field_goals.py [--results FILE] [--fresh [--processes 1]]

The figures are those of `stretto lab field`, which keeps them in docs/field.jsonl. With `--fresh` the cases of
`stretto` itself are simulated again from the traces under STRETTO_DATA (some minutes); the file is not changed, and
cases whose figures there are no longer those of today's policy are named in the last line (`stale`).

At equal cost: mean completion against the best other policy of the class; with known lengths against the dual bound,
which no schedule can beat; p99 against rigid tiresias; finish-time fairness against equal sharing (1). At
everybody's own cost the ratios to all others, whatever they are. One line of JSON for each, the last one for all.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from _verdict import report
from stretto.lab import field
from stretto.lab.field import CLASSES, WORLDS, Case, World

Found = dict[str, dict[str, Any]]
RESULTS = Path(__file__).parent.parent / "docs" / "field.jsonl"
MEAN, P99, FAIRNESS = 1.01, 1.0, 1.5
BOUND = {"itp-06": 1.05, "itp-02": 1.08, "itp-01": 1.14}
SAME = 1e-9


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """Ours against a peer, and what their ratio must be."""

    name: str
    peer_name: str
    ours: float | None
    peer: float | None
    unit: str = "s"
    most: float | None = None
    """The ratio must be at most this; None: reported only."""
    below: bool = False
    """It must be less than `most`."""
    missing: tuple[str, ...] = ()
    """Cases without which the goal cannot be called met."""
    ratios: dict[str, float] = {}

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or self.peer is None else self.ours / self.peer

    @property
    def text(self) -> str:
        return "reported" if self.most is None else f"{'<' if self.below else '<='} {self.most:g}"

    @property
    def ok(self) -> bool:
        if self.ratio is None or self.missing:
            return False
        return self.most is None or self.ratio < self.most or (not self.below and self.ratio == self.most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="simulate the cases of stretto again")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    arguments = parser.parse_args()
    found = field.read(arguments.results)
    more: dict[str, object] = {"from": "the file of results"}
    if arguments.fresh:
        if "STRETTO_DATA" not in os.environ:
            parser.error("--fresh needs STRETTO_DATA, the folder with the public traces")
        new = fresh(Path(os.environ["STRETTO_DATA"]), arguments.processes)
        stale = [key for key, line in new.items() if not same(line, found.get(key))]
        found |= new
        more = {"from": "stretto simulated now, the others from the file of results", "stale": stale}
    goals = list(all_goals(found))
    show(goals)
    for goal in goals:
        extra = {"ratios": goal.ratios} if goal.ratios else {}
        report(
            f"field_goals: {goal.name}, against {goal.peer_name}",
            ours=rounded(goal.ours),
            peer=rounded(goal.peer),
            ratio=rounded(goal.ratio),
            unit=goal.unit,
            goal=goal.text,
            ok=goal.ok,
            **extra,
        )
    missed = [goal.name for goal in goals if not goal.ok]
    report(
        "field_goals: all",
        ours=len(goals) - len(missed),
        peer=len(goals),
        ratio=rounded((len(goals) - len(missed)) / len(goals)),
        unit="goals met",
        goal="all",
        ok=not missed,
        missed=missed,
        **more,
    )


def all_goals(found: Found) -> Iterator[Goal]:
    pairs = [(world, lengths) for world in WORLDS for lengths in CLASSES]
    for world, lengths in pairs:
        yield against_best(found, world, lengths, "equal", MEAN)
    for name, most in BOUND.items():
        world = next(world for world in WORLDS if world.name == name)
        ours = figure(found, Case(world, "known", "stretto", "equal").key, "avg_jct_s")
        bound = figure(found, f"{name} dual-bound", "avg_jct_s")
        yield Goal(name=f"{name} known bound", peer_name="the dual bound", ours=ours, peer=bound, most=most)
    for world, lengths in pairs:
        ours = figure(found, Case(world, lengths, "stretto", "equal").key, "p99_jct_s")
        tiresias = figure(found, Case(world, "unknown", "tiresias", "equal").key, "p99_jct_s")
        name = f"{world.name} {lengths} p99"
        yield Goal(name=name, peer_name="rigid tiresias", ours=ours, peer=tiresias, most=P99)
    for world, lengths in pairs:
        ours = figure(found, Case(world, lengths, "stretto", "equal").key, "worst_ftf")
        name = f"{world.name} {lengths} fairness"
        yield Goal(
            name=name, peer_name="equal sharing", ours=ours, peer=1.0, unit="worst rho", most=FAIRNESS, below=True
        )
    for world, lengths in pairs:
        yield against_best(found, world, lengths, "own", None)


def against_best(found: Found, world: World, lengths: str, cost: str, most: float | None) -> Goal:
    """Mean completion against the best of the other policies; the ratios to all of them where that is no goal."""
    ours = figure(found, Case(world, lengths, "stretto", cost).key, "avg_jct_s")
    others = {
        name: figure(found, Case(world, lengths, name, cost).key, "avg_jct_s")
        for name in CLASSES[lengths]
        if name != "stretto"
    }
    there = {name: mean for name, mean in others.items() if mean is not None}
    best = min(there, key=lambda name: there[name], default="nobody")
    reported = ours is not None and most is None
    return Goal(
        name=f"{world.name} {lengths} mean, {cost} cost",
        peer_name=best,
        ours=ours,
        peer=there.get(best),
        most=most,
        missing=tuple(name for name in others if name not in there),
        ratios={name: round(ours / mean, 4) for name, mean in there.items()} if ours is not None and reported else {},
    )


def figure(found: Found, key: str, name: str) -> float | None:
    value = found.get(key, {}).get(name)
    return None if value is None else float(value)


def fresh(data: Path, processes: int) -> Found:
    """The cases of `stretto`, simulated now. Its own cost is the equal one, so one run serves both."""
    cases = {cost: [c for c in field.cases((), ["stretto"]) if c.cost == cost] for cost in ("equal", "own")}
    new: Found = {}
    with ProcessPoolExecutor(processes) as pool:
        lines = pool.map(field.run_case, cases["equal"], [data] * len(cases["equal"]))
        for equal, own, line in zip(cases["equal"], cases["own"], lines, strict=True):
            assert own.settings == equal.settings
            new |= {case.key: {**line, "key": case.key} for case in (equal, own)}
    return new


def same(line: dict[str, Any], stored: dict[str, Any] | None) -> bool:
    """Whether the file tells the same, apart from the time it took."""
    return stored is not None and all(
        abs(line[name] - stored[name]) <= SAME * abs(line[name]) for name in field.FIGURES if name != "cpu_s"
    )


def show(goals: list[Goal]) -> None:
    print(f"{'goal':36} {'ours':>12} {'peer':>12} {'ratio':>7} {'goal':>8}  {'':6} peer")
    for goal in goals:
        ours, peer = (f"{value:,.2f}" if value is not None else "none" for value in (goal.ours, goal.peer))
        ratio = f"{goal.ratio:.3f}" if goal.ratio is not None else ""
        verdict = "MISSED" if not goal.ok else ""
        without = f"; not run: {', '.join(goal.missing)}" if goal.missing else ""
        print(f"{goal.name:36} {ours:>12} {peer:>12} {ratio:>7} {goal.text:>8}  {verdict:6} {goal.peer_name}{without}")
        if goal.ratios:
            print(" " * 36 + "  ".join(f" {name} {value:.3f}" for name, value in goal.ratios.items()))


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    main()
