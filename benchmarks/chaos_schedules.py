"""Does a job end with the right result, whatever happens to it? Random schedules of faults on real processes.

    python benchmarks/chaos_schedules.py [--jobs 2] [--mode bitwise] [--body phases]… [--seeds 0:20] [--keep FOLDER]

Each schedule trains a small model while workers are killed, frozen, sent away and added, and the coordinator is killed
and started again, many of these at awkward moments; the seed alone says what is done, when and to whom. It must end, no
worker may end oddly, every sample must be once per epoch in the ledger of the indices really fed to the model, and the
weights must be those of one worker alone: within 1e-9 by norm (float64, no BatchNorm, no dropout), or bit by bit in
bitwise mode (float32, with both). At the end one sample is left out or fed twice on purpose, with the ledger told or
not, and the same checks must fail. `--body` is how the loop is written: three `job.phases` on each batch, steps that
are taken one by one with `job.attempt`, exchanges of every kind in the body and between the loops, `job.steps`, or a
model with SyncBatchNorm (not in bitwise mode). Schedules take these in turn, unless it is said which; half of them are
plain. Training and checks are those of tests/torch/chaos.py: the test suite shows that they can fail, and runs a few of
these schedules.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from _verdict import report
from stretto.backends.local.forkserver import ForkServer
from stretto.testing.faults import Played, schedule

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "torch"))
import chaos

SEEDS = {"default": range(130), "bitwise": range(130, 200)}
CAUGHT = {
    "drop": "missing: loop",
    "double": "doubled: loop",
    "silent drop": "the weights differ",
    "silent double": "the weights differ",
}
"""The deliberate mistakes, and how each must be found."""
_SHOWN = 30
"""Lines of a failure."""


class Run(NamedTuple):
    mode: str
    body: str
    seed: int
    mutate: str = ""

    def __str__(self) -> str:
        return f"{self.mode} {self.body} {self.seed}{f', {self.mutate}' if self.mutate else ''}"


class Outcome(NamedTuple):
    run: Run
    played: Played
    restores: int
    seconds: float
    failure: str


class Bench:
    """Runs schedules in a folder; what failed stays there if it was given by the user."""

    def __init__(self, folder: Path, warm: ForkServer, runs: list[Run]) -> None:
        self.folder, self.warm = folder, warm
        kinds = dict.fromkeys((run.mode, run.body) for run in runs)
        self.cases: dict[tuple[str, str], dict[str, Any]] = {kind: chaos.of_mode(*kind) for kind in kinds}
        self.expected = {
            kind: chaos.reference(folder / f"alone-{'-'.join(kind)}", case, warm=warm)
            for kind, case in self.cases.items()
        }

    def run(self, run: Run) -> Outcome:
        folder = self.folder / str(run).replace(", ", "-").replace(" ", "-")
        kind = run.mode, run.body
        case = {**self.cases[kind], "mutate": run.mutate}
        began_s = time.monotonic()
        played, failure = Played(), ""
        try:
            played = chaos.trial(run.seed, folder, case, self.expected[kind], self.warm)
        except Exception as error:  # Whatever goes wrong is the schedule's failure, not the end of the others.
            failure = f"{type(error).__name__}: {error}"
        outcome = Outcome(run, played, chaos.restores(folder), time.monotonic() - began_s, failure)
        if failure:
            (folder / "failure").write_text(failure)
        else:
            shutil.rmtree(folder)
        return outcome


def main() -> None:
    given = arguments()
    print(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, {given.jobs} at once"
    )
    runs = [
        Run(mode, body, seed)
        for mode in given.modes
        for seed, body in zip(given.seeds or SEEDS[mode], itertools.cycle(bodies(mode, given.bodies)), strict=False)
    ]
    spoilt = [
        Run(mode, body, (given.seeds or SEEDS[mode])[0], mutate)
        for mode in given.modes
        for body in dict.fromkeys(bodies(mode, given.bodies))
        for mutate in (CAUGHT if body == "plain" else ["silent drop"])
    ]
    with tempfile.TemporaryDirectory() as temporary, chaos.warm_server() as warm:
        bench = Bench(given.keep or Path(temporary), warm, [*runs, *spoilt])
        outcomes = list(played(bench, runs, given.jobs))
        caught = [run for run, *_, failure in played(bench, spoilt, given.jobs) if CAUGHT[run.mutate] in failure]
    summary(outcomes)
    print(f"{len(caught)} of {len(spoilt)} deliberate mistakes caught")
    verdict(outcomes, len(caught), len(spoilt))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="schedules at once")
    parser.add_argument("--mode", dest="modes", action="append", choices=sorted(SEEDS), help="both if not given")
    parser.add_argument(
        "--body", dest="bodies", action="append", choices=list(chaos.BODIES), help="how the loop is written"
    )
    parser.add_argument("--seeds", type=seeds, help="first:stop, for each mode")
    parser.add_argument("--keep", type=Path, help="a folder in which the files of schedules that failed stay")
    given = parser.parse_args()
    given.modes = given.modes or ["default", "bitwise"]
    return given


def bodies(mode: str, asked: list[str] | None) -> list[str]:
    """Those that schedules of this mode take in turn."""
    possible = [body for body, modes in chaos.BODIES.items() if mode in modes and body in (asked or chaos.BODIES)]
    if asked:
        return possible
    return [body for other in possible[1:] for body in ("plain", other)]


def seeds(text: str) -> range:
    first, _, stop = text.partition(":")
    return range(int(first), int(stop))


def played(bench: Bench, runs: list[Run], jobs: int) -> Iterator[Outcome]:
    """Each as it ends, with its line."""
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(bench.run, runs):
            print(line(outcome), flush=True)
            yield outcome


def line(outcome: Outcome) -> str:
    played = outcome.played
    told = f"{outcome.run}: {schedule(outcome.run.seed)}"
    if outcome.failure:
        lines = outcome.failure.split("\n")
        more = [f"  and {len(lines) - _SHOWN} more lines (--keep)"] if len(lines) > _SHOWN else []
        return "\n".join(
            [f"{told} -> {'caught' if outcome.run.mutate else 'FAILED'}: {lines[0]}", *lines[1:_SHOWN], *more]
        )
    end = f"{played.generations} generations ({played.unplanned} unplanned), {outcome.restores} restores"
    return f"{told} -> {played.end['event']}, {end}, {outcome.seconds:.1f} s"


def summary(outcomes: list[Outcome]) -> None:
    for title, which in (("struck", "struck"), ("of these met", "during"), ("came to nothing", "missed")):
        counts: Counter[str] = sum((getattr(outcome.played, which) for outcome in outcomes), Counter())
        print(f"{title}: {', '.join(f'{name} {count}' for name, count in counts.most_common()) or 'nothing'}")
    generations, unplanned = (sum(getattr(o.played, name) for o in outcomes) for name in ("generations", "unplanned"))
    print(f"{generations} generations, {unplanned} of them unplanned; {sum(o.restores for o in outcomes)} restores")
    longest = max(outcomes, key=lambda outcome: outcome.seconds)
    print(f"the longest, {longest.run}, took {longest.seconds:.1f} s")


def verdict(outcomes: list[Outcome], caught: int, mistakes: int) -> None:
    failed = [str(outcome.run) for outcome in outcomes if outcome.failure]
    ok = not failed and caught == mistakes
    struck = sum(outcome.played.struck.total() for outcome in outcomes)
    report(
        "chaos-schedules",
        ours=len(outcomes) - len(failed),
        peer=None,
        ratio=None,
        unit="schedules of faults with the result of one worker alone",
        goal=f"all {len(outcomes)}, and every deliberate mistake caught",
        ok=ok,
        failed=failed,
        bodies=dict(Counter(outcome.run.body for outcome in outcomes)),
        faults=struck,
        mistakes_caught=f"{caught} of {mistakes}",
        longest_s=round(max(outcome.seconds for outcome in outcomes), 1),
        cores=len(os.sched_getaffinity(0)),
    )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
