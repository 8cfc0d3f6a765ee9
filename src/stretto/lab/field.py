"""`stretto` against the field: every policy of a class on the same traces, at its own resize cost and at equal cost.

Two classes: policies that are told how long jobs are, and policies that are not. ITP clusters 01, 02 and 06, their
jobs made elastic by measured speed-ups, and Pollux workloads 1 to 6, on which every elastic policy uses the best batch
size at each size. Restart-based systems stop a job for 30 s at every start or resize, ours for 0.5 s.

Each finished case is written to a JSON-lines file at once; a case that is in it is not run again, so a long comparison
can be stopped, continued and widened. `table` turns the file into the page of the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import UsageError
from stretto.sim import dual_bound, runner

OWN_S, RESTART_S = 0.5, 30.0


class World(msgspec.Struct, frozen=True):
    """A trace with its cluster. Paths are below the folder with the public traces."""

    name: str
    path: str
    format: str
    cluster: str


WORLDS = (
    World("itp-01", "elasticflow/elasticflow/cluster01.csv", "itp", "8x8"),
    World("itp-02", "elasticflow/elasticflow/cluster02.csv", "itp", "16x8"),
    World("itp-06", "elasticflow/elasticflow/cluster06.csv", "itp", "16x8"),
    *(World(f"pollux-{n}", f"pollux/workloads/workload-{n}.csv", "pollux", "16x4") for n in range(1, 7)),
)

CLASSES: dict[str, tuple[str, ...]] = {
    "known": ("srtf", "srsf", "afs-l", "optimus", "ffdl", "pollux", "sia", "stretto"),
    "unknown": ("tiresias", "tiresias-gittins", "elastic-tiresias", "themis", "elastic-fifo", "stretto"),
}

# A full search (100 placements, 100 generations, every minute) would take days on a trace of two months.
_SEARCH = {
    "itp": {"population": "24", "generations": "12", "round_s": "600"},
    "pollux": {"population": "40", "generations": "30"},
}

FIGURES = ("avg_jct_s", "p50_jct_s", "p99_jct_s", "worst_ftf", "unfair_share", "preemptions", "resizes", "cpu_s")


class Case(msgspec.Struct, frozen=True):
    """One cell of the comparison."""

    world: World
    lengths: str
    policy: str
    cost: str
    """`own`: each system's own resize cost; `equal`: 0.5 s for everybody."""

    @property
    def key(self) -> str:
        return f"{self.world.name} {self.lengths} {self.policy} {self.cost}"

    @property
    def settings(self) -> dict[str, str]:
        pause = OWN_S if self.cost == "equal" or self.policy == "stretto" else RESTART_S
        settings = {"start_s": str(pause), "resize_s": str(pause), "lengths": self.lengths}
        if self.world.format == "pollux":
            settings["batch"] = "adaptive"
        return settings | (_SEARCH[self.world.format] if self.policy == "pollux" else {})


def cases(worlds: Sequence[str] = (), policies: Sequence[str] = ()) -> Iterator[Case]:
    """All cells, or those of some worlds and policies."""
    _known("trace", worlds, [world.name for world in WORLDS])
    _known("policy", policies, sorted({name for names in CLASSES.values() for name in names}))
    for world in WORLDS:
        for lengths, names in CLASSES.items():
            for policy in names:
                for cost in ("equal", "own"):
                    if (not worlds or world.name in worlds) and (not policies or policy in policies):
                        yield Case(world, lengths, policy, cost)


def run_case(case: Case, data: Path) -> dict[str, Any]:
    """Simulate one cell."""
    prepared = runner.prepare(data / case.world.path, case.world.format, case.world.cluster, case.policy, case.settings)
    found = msgspec.to_builtins(runner.run(prepared).metrics)
    return {"key": case.key, **{name: found[name] for name in FIGURES}}


def run(
    todo: Iterable[Case], data: Path, results: Path, processes: int, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run what is not in the file of results yet, several at a time; everything found so far."""
    found = read(results)
    left = [case for case in todo if case.key not in found]
    if not data.is_dir():
        raise UsageError(f"folder {str(data)!r} does not exist", hint="give the folder with the public traces")
    results.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool, results.open("a") as file:
        running = {pool.submit(run_case, case, data): case for case in left}
        for future in as_completed(running):
            line = future.result()
            found[line["key"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            tell(f"{line['key']}: mean {line['avg_jct_s']:,.0f} s, {line['cpu_s']:.0f} s CPU")
    return found


def bounds(worlds: Sequence[str], data: Path, results: Path, tell: Callable[[str], None]) -> None:
    """The time-priced dual bound of the ITP traces, which takes minutes each."""
    found = read(results)
    for world in WORLDS:
        key = f"{world.name} dual-bound"
        if world.format != "itp" or key in found or (worlds and world.name not in worlds):
            continue
        case = runner.prepare(data / world.path, world.format, world.cluster, "stretto", {})
        value = dual_bound.average_jct(case.seen, case.gpus)
        with results.open("a") as file:
            file.write(json.dumps({"key": key, "avg_jct_s": value}) + "\n")
        tell(f"{key}: {value:,.0f} s")


def read(results: Path) -> dict[str, dict[str, Any]]:
    """What the file of results holds, by key."""
    if not results.is_file():
        return {}
    try:
        lines = [json.loads(line) for line in results.read_text().splitlines() if line.strip()]
        return {line["key"]: line for line in lines}
    except (ValueError, TypeError, KeyError):
        hint = "give another file with --results, or leave out the damaged line"
        raise UsageError(f"{str(results)!r} is not a file of results", hint=hint) from None


def table(found: dict[str, dict[str, Any]]) -> str:
    """The comparison as Markdown: a table per class and cost, a block per trace."""
    parts = []
    for lengths, names in CLASSES.items():
        for cost, title in (("equal", "everybody at 0.5 s"), ("own", "each at its own cost (others 30 s, ours 0.5 s)")):
            parts.append(f"### Lengths {lengths}, {title}\n")
            parts.append("| trace | policy | mean s | ÷ stretto | ÷ bound | p50 s | p99 s | worst rho | rho > 1.05 |")
            parts.append("|---|---|---|---|---|---|---|---|---|")
            for world in WORLDS:
                ours = found.get(Case(world, lengths, "stretto", cost).key)
                bound = found.get(f"{world.name} dual-bound", {}).get("avg_jct_s")
                for policy in names:
                    line = found.get(Case(world, lengths, policy, cost).key)
                    if line is not None:
                        parts.append(_row(world.name, policy, line, ours, bound))
            parts.append("")
    return "\n".join(parts)


def verdicts(found: dict[str, dict[str, Any]]) -> list[str]:
    """For each trace and class at equal cost: how ours compares with the best of the others."""
    lines = []
    for world in WORLDS:
        for lengths, names in CLASSES.items():
            ours = found.get(Case(world, lengths, "stretto", "equal").key)
            others = {p: found.get(Case(world, lengths, p, "equal").key) for p in names if p != "stretto"}
            there = {p: line["avg_jct_s"] for p, line in others.items() if line is not None}
            if ours is None or not there:
                continue
            best = min(there, key=lambda p: there[p])
            ratio = ours["avg_jct_s"] / there[best]
            missing = [p for p, line in others.items() if line is None]
            lines.append(
                f"{world.name} {lengths}: {ratio:.3f} × the best of the others ({best}), "
                f"worst rho {ours['worst_ftf']:.2f}, p99 {ours['p99_jct_s']:,.0f} s"
                + (f"; not run: {', '.join(missing)}" if missing else "")
            )
    return lines


def _row(world: str, policy: str, line: dict[str, Any], ours: dict[str, Any] | None, bound: float | None) -> str:
    ratio = f"{line['avg_jct_s'] / ours['avg_jct_s']:.3f}" if ours else ""
    above = f"{line['avg_jct_s'] / bound:.3f}" if bound else ""
    name = f"**{policy}**" if policy == "stretto" else policy
    return (
        f"| {world} | {name} | {line['avg_jct_s']:,.0f} | {ratio} | {above} | {line['p50_jct_s']:,.0f} "
        f"| {line['p99_jct_s']:,.0f} | {line['worst_ftf']:.2f} | {100 * line['unfair_share']:.0f} % |"
    )


def _known(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"the comparison has no {kind} {name!r}", hint=f"it has: {', '.join(known)}")
