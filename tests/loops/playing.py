"""How a habit is played: by hand, or as a job to which things happen, and how its result is compared with a plain one.

The tests play one fixed schedule for each habit, benchmarks/loop_schedules.py random ones.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.testing import Harness

HERE = Path(__file__).parent
RUN = [sys.executable, str(HERE / "run.py")]
OPTIONS = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 5.0, "formation_s": 10.0}
HABITS = sorted(path.stem for path in (HERE / "habits").glob("[a-z]*.py"))
TOLERANCE = 1e-9
"""By norm; a habit in less than float64 has one of its own."""
LEAST_STEPS = 60
KINDS = ("growth", "leave", "body", "sum")
"""More workers come; some leave; one dies in the middle of the loop's body; one while it adds up gradients."""
MOST_WORKERS = 4


def warm_server() -> ForkServer:
    server = ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch"))
    server.wait_ready()
    return server


def started(
    folder: Path, warm: ForkServer, name: str, workers: int, min_workers: int | None = None, **environment: str
) -> Harness:
    folder.mkdir(parents=True)
    return Harness(
        folder / "job", [*RUN, name, str(folder)], workers=workers, min_workers=min_workers or workers,
        environment={"OMP_NUM_THREADS": "1", **environment}, options=OPTIONS, warm=warm, replace=True,
    )  # fmt: skip


def by_hand(folder: Path, warm: ForkServer, name: str) -> tuple[int | None, str]:
    """Its exit status, and what it said."""
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with launch([*RUN, name, str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, log=log, warm=warm) as process:
        return process.wait(120.0), log.read_text()


class Habit:
    """One of them, and what it comes to without Stretto."""

    def __init__(self, name: str) -> None:
        module = importlib.import_module(f"habits.{name}")
        self.right: dict[str, Tensor] = module.plain()
        self.within: float = getattr(module, "TOLERANCE", TOLERANCE)
        self.exchanges = hasattr(module, "EXCHANGES")
        """Whether its workers exchange more than gradients: then one of them dies there, too."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of what happens to it."""
        return (*KINDS, "exchange") if self.exchanges else KINDS

    def far(self, found: dict[str, Tensor]) -> dict[str, float]:
        """What differs, by norm."""
        assert found.keys() == self.right.keys()
        off = {name: by_norm(found[name], self.right[name]) for name in self.right}
        return {name: much for name, much in off.items() if not much <= self.within}


def hurry(folder: Path, until: int | None = None) -> None:
    """Let training go as fast as it can, up to this step."""
    made = folder / "hurry.new"
    made.write_text("" if until is None else str(until))
    made.rename(folder / "hurry")


def strike(harness: Harness, folder: Path, sign: str, victim: str) -> bool:
    """Have this worker die there, and wait until the others go on without it; False if the job was over before."""
    asked = folder / f"{sign}-{victim}"
    asked.touch()
    harness.wait(lambda: harness.worker(victim).status == -signal.SIGKILL or harness.over, f"a death in the {sign}")
    harness.wait(lambda: victim not in harness.members() or harness.over, "the others have noticed")
    return not asked.exists() and not harness.over


def by_norm(found: Tensor, right: Tensor) -> float:
    if found.shape != right.shape:
        return math.inf
    return float((found - right).double().norm() / (right.double().norm() + 1e-30))


def results(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What those who were members at the end have written, by name."""
    found = [*folder.glob("w[0-9]*.pt"), *folder.glob("alone.pt")]
    return {path.stem: torch.load(path) for path in sorted(found)}


def steps(folder: Path) -> int:
    """How many steps it took; 0 if nobody came to the end."""
    told = folder / "steps"
    return int(told.read_text()) if told.exists() else 0


class Event(NamedTuple):
    """Something that happens to the job."""

    kind: str
    after: int
    """Applied steps."""
    size: int
    """How many workers there are afterwards."""
    pick: float
    """Whom it hits, from 0 to 1."""

    def __str__(self) -> str:
        return f"{self.after}: {self.kind} →{self.size}"


class Schedule(NamedTuple):
    workers: int
    """At the start."""
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return "; ".join([f"{self.workers} workers", *map(str, self.events)])


def schedule(seed: int, kinds: tuple[str, ...] = KINDS, last: int = 50) -> Schedule:
    """A random one, with two or three events of each kind, up to about this step."""
    chance = random.Random(seed)
    workers = size = chance.randint(1, MOST_WORKERS)
    to_come = Counter({kind: chance.randint(2, 3) for kind in kinds})
    events: list[tuple[str, int]] = []
    while any(to_come[kind] > 0 for kind in kinds):
        possible = [kind for kind in kinds if to_come[kind] > 0 and _possible(kind, size)]
        # Whoever is to die or to leave needs others who go on.
        kind = chance.choice(possible) if possible else "growth" if size < MOST_WORKERS else "leave"
        to_come[kind] -= 1
        size = _size_after(kind, size, chance)
        events.append((kind, size))
    times = sorted(chance.randint(2, last) for _ in events)
    return Schedule(
        workers,
        tuple(Event(kind, after, size, chance.random()) for (kind, size), after in zip(events, times, strict=True)),
    )


def _possible(kind: str, size: int) -> bool:
    return size < MOST_WORKERS if kind == "growth" else size > 1


def _size_after(kind: str, size: int, chance: random.Random) -> int:
    if kind == "growth":
        return chance.randint(size + 1, MOST_WORKERS)
    return chance.randint(1, size - 1) if kind == "leave" else size - 1


def play(plan: Schedule, harness: Harness, folder: Path) -> Counter[str]:
    """Play the schedule on a job that has begun, and let it hurry to its end; how often each kind really struck."""
    struck: Counter[str] = Counter()
    harness.wait(lambda: len(harness.members()) == plan.workers or harness.over, "all are in")
    for event in plan.events:
        hurry(folder, event.after)
        harness.wait_applied(event.after)
        struck[event.kind] += not harness.over and _happens(event, harness, folder)
    hurry(folder)
    return struck


def _happens(event: Event, harness: Harness, folder: Path) -> bool:
    members = harness.members()
    first = int(event.pick * len(members))
    victims = [*members[first:], *members[:first]]
    if event.kind in ("body", "sum", "exchange"):
        return strike(harness, folder, event.kind, victims[0])
    if event.kind == "growth":
        harness.want(event.size)
    else:
        harness.leave(*victims[event.size :])
    harness.wait(lambda: len(harness.members()) == event.size or harness.over, f"{event.size} members")
    return not harness.over
