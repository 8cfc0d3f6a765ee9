"""Do loops as people write them have the result of plain PyTorch, whatever happens to the job? Random schedules.

    python benchmarks/loop_schedules.py [--seeds 0:5] [--habits stopping,noisy] [--at-once 4] [--keep FOLDER]

Every habit of tests/loops runs by hand once, and as a job under five schedules: workers come, leave, die in the middle
of the loop's body, while they add up gradients and while they exchange anything else, at least twice each; the seed
says in which order, after how many steps and to whom. All tensors that a habit ends with, on every worker that is there
at the end, are compared with those of a training that knows nothing of Stretto (1e-9 by norm, float64). A run in which
one of these did not strike, or that had fewer than 60 steps, is not measured: the next seeds are tried, and if none
will do the habit has failed.
"""

from __future__ import annotations

import argparse
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
from typing import NamedTuple

import torch
from torch import Tensor

from _verdict import report
from stretto.backends.local.forkserver import ForkServer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "loops"))
import playing

SEEDS = range(5)
PACE_S = "0.25"
"""Of a step while something happens: so slow that all of it happens in 80 steps."""
AGAIN = 3
"""So many more seeds are tried where a schedule did not strike."""
DEADLINE_S = 120.0


class Outcome(NamedTuple):
    habit: str
    plan: str
    seed: int
    struck: Counter[str]
    steps: int
    workers: int
    """At the end."""
    seconds: float
    failure: str
    measured: bool


class Bench:
    """Runs habits in a folder; what failed stays there if it was given by the user."""

    def __init__(self, folder: Path, warm: ForkServer) -> None:
        self.folder, self.warm = folder, warm

    def by_hand(self, name: str, habit: playing.Habit) -> str:
        """What is wrong with it."""
        folder = self.folder / f"{name}-hand"
        shutil.rmtree(folder, ignore_errors=True)
        status, text = playing.by_hand(folder, self.warm, name)
        failure = text if status else _differences(habit, ["alone"], playing.results(folder))
        self._tidy(folder, failure)
        return failure

    def run(self, name: str, seed: int, habit: playing.Habit) -> Outcome:
        folder = self.folder / f"{name}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        plan, struck, steps, failure = playing.schedule(seed, habit.kinds), Counter[str](), 0, ""
        began_s = time.monotonic()
        found: dict[str, dict[str, Tensor]] = {}
        with playing.started(folder, self.warm, name, plan.workers, min_workers=1, PACE_S=PACE_S) as harness:
            try:
                struck = playing.play(plan, harness, folder)
                end = harness.wait_over(DEADLINE_S)
                steps, found = playing.steps(folder), playing.results(folder)
                failure = "" if end["event"] == "done" else harness.describe()
                failure = failure or _differences(habit, harness.members(), found)
            except Exception as error:  # Whatever goes wrong is the run's failure, not the end of the others.
                failure = f"{type(error).__name__}: {error}"
        self._tidy(folder, failure)
        measured = all(struck[kind] for kind in habit.kinds) and steps >= playing.LEAST_STEPS
        return Outcome(name, str(plan), seed, struck, steps, len(found), time.monotonic() - began_s, failure, measured)

    def _tidy(self, folder: Path, failure: str) -> None:
        if failure:
            (folder / "failure").write_text(failure)
        else:
            shutil.rmtree(folder)


def main() -> None:
    given = arguments()
    print(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, torch {torch.__version__}")
    outcomes: list[Outcome] = []
    hands: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary, playing.warm_server() as warm:
        bench = Bench(given.keep or Path(temporary), warm)

        torch.set_num_threads(1)
        # One after the other: they seed the generators of this process.
        known = {name: playing.Habit(name) for name in given.habits}

        def play(name: str) -> None:
            habit = known[name]
            hands[name] = bench.by_hand(name, habit)
            print(f"{name} by hand: {_first_line(hands[name]) if hands[name] else 'equal'}", flush=True)
            for seed in given.seeds:
                outcomes.extend(measured(bench, name, seed, habit))

        with ThreadPoolExecutor(given.at_once) as pool:
            # Asked for, so that errors are raised here.
            list(pool.map(play, given.habits))
    verdict(given, outcomes, [habit for habit, failure in hands.items() if failure])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default=SEEDS, help="first:stop, for each habit")
    parser.add_argument("--habits", type=habits, default=playing.HABITS, help="names with commas; all if not given")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at a time: they wait more than they work")
    parser.add_argument("--keep", type=Path, help="a folder in which the files of runs that failed stay")
    return parser.parse_args()


def seeds(text: str) -> range:
    first, _, stop = text.partition(":")
    return range(int(first), int(stop))


def habits(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in playing.HABITS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such habit: {', '.join(unknown)}; there are {', '.join(playing.HABITS)}")
    return names


def measured(bench: Bench, name: str, seed: int, habit: playing.Habit) -> Iterator[Outcome]:
    """The run with this seed, or with one far from the others' where it did not strike."""
    for again in range(1 + AGAIN):
        outcome = bench.run(name, seed + 1000 * again, habit)
        print(line(outcome), flush=True)
        yield outcome
        if outcome.measured or outcome.failure:
            return


def line(outcome: Outcome) -> str:
    struck = ", ".join(f"{kind} {times}" for kind, times in sorted(outcome.struck.items()))
    told = f"{outcome.habit} {outcome.seed}: {outcome.plan} -> {struck}; {outcome.steps} steps"
    if outcome.failure:
        return f"{told}: FAILED: {outcome.failure}"
    what = f"equal on {outcome.workers} workers" if outcome.measured else "equal, but NOT MEASURED"
    return f"{told}: {what}, {outcome.seconds:.1f} s"


def _differences(habit: playing.Habit, expected: list[str], found: dict[str, dict[str, Tensor]]) -> str:
    """Of whoever should have a result."""
    if set(expected) != found.keys():
        return f"results of {', '.join(found) or 'nobody'}, not of {', '.join(expected)}"
    off = {worker: habit.far(result) for worker, result in found.items()}
    return "; ".join(
        f"{worker} is off in {', '.join(f'{name} by {much:.1e}' for name, much in far.items())}"
        for worker, far in off.items()
        if far
    )


def _first_line(text: str) -> str:
    return "FAILED: " + text.strip().splitlines()[-1]


def verdict(given: argparse.Namespace, outcomes: list[Outcome], wrong_by_hand: list[str]) -> None:
    counted = [outcome for outcome in outcomes if outcome.measured and not outcome.failure]
    failed = [f"{outcome.habit} {outcome.seed}" for outcome in outcomes if outcome.failure]
    goal = len(given.habits) * len(given.seeds)
    struck: Counter[str] = sum((outcome.struck for outcome in counted), Counter())
    print(f"struck: {', '.join(f'{kind} {times}' for kind, times in struck.items())}")
    ok = len(counted) == goal and not failed and not wrong_by_hand
    report(
        "loop-schedules",
        ours=len(counted),
        peer=None,
        ratio=None,
        unit="runs under random faults with the tensors of plain PyTorch",
        goal=f"{len(given.seeds)} of each of {len(given.habits)} habits, and all by hand",
        ok=ok,
        failed=failed,
        wrong_by_hand=wrong_by_hand,
        not_measured=sum(not outcome.measured and not outcome.failure for outcome in outcomes),
        struck=dict(struck),
        fewest_steps=min((outcome.steps for outcome in counted), default=0),
        longest_s=round(max((outcome.seconds for outcome in outcomes), default=0.0), 1),
        cores=len(os.sched_getaffinity(0)),
    )
    sys.exit(not ok)


if __name__ == "__main__":
    main()
