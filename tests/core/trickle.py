"""A small machine on which programs keep coming: what each really is, apart from what anybody believes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from strategies import job, view_of
from stretto.core import cycle
from stretto.core.cycle import CycleState, Settings
from stretto.core.policy import load
from stretto.core.snapshot import Snapshot

START_S = 0.5
POLL_S = 10.0
JOINS_S = 1.0
"""So long after its launch a script that takes part has joined."""


class Program(msgspec.Struct):
    """`plain`: it loses everything by a stop. `never-joins`: as well, but its job file says that it is elastic.
    `stays`: it loses nothing, and is not preemptible."""

    number: int
    arrives_s: float
    size: int
    lasts_s: float
    hint_s: float = math.nan
    """What its user says of its length; nan: nothing."""
    kind: Literal["plain", "never-joins", "joins", "stays"] = "plain"
    priority: int = 0
    preemptible: bool = False
    workers: int = 0
    launched_s: float = math.nan
    began_s: float = math.nan
    """The first launch."""
    done_s: float = 0.0
    lost_s: float = 0.0
    until_s: float = 0.0
    """When it must have started, if it has a reservation."""

    @property
    def loses(self) -> bool:
        """Whether a stop would lose what it did."""
        return self.kind in ("plain", "never-joins")

    def speed(self) -> float:
        return self.workers / self.size

    def ends_s(self, now_s: float) -> float:
        return now_s + (self.lasts_s - self.done_s) / self.speed() if self.workers else math.inf

    def left_s(self) -> float:
        """As a hint says; whoever outlives it lasts as long again."""
        return self.hint_s - self.done_s if self.done_s < self.hint_s else max(self.done_s, START_S)

    def row(self, now_s: float) -> dict[str, Any]:
        elastic = self.kind in ("joins", "never-joins")
        return job(
            min_workers=1 if elastic else self.size, max_workers=self.size, requested=self.size,
            remaining=math.nan if math.isnan(self.hint_s) else self.left_s() * self.size, remaining_sd=0.7,
            done=self.done_s * self.size, priority=self.priority, submit_s=self.arrives_s, workers=self.workers,
            ran_s=self.done_s, gpu_s=self.done_s * self.size, start_s=START_S, resize_s=START_S,
            lost_s=now_s - self.launched_s if self.workers and self.loses else 0.0, fragile=self.kind == "plain",
            preemptible=(self.preemptible or elastic) and self.kind != "stays",
            changed_s=self.launched_s if self.workers else self.arrives_s,
        )  # fmt: skip


class Trickle:
    """The cycle decides whenever somebody comes or ends, when the policy wants to be woken, and now and then."""

    def __init__(self, slots: int, programs: Iterable[Program], policy: str, **options: Any) -> None:
        self.slots, self.policy = slots, load(policy, options)
        self.coming = sorted(programs, key=lambda one: one.arrives_s)
        self.there: dict[int, Program] = {}
        self.now_s, self.state, self.wake_s = 0.0, CycleState(), math.inf
        self.settings = Settings(hysteresis=True)

    def run(self, until_s: float) -> None:
        while (next_s := self._next_s()) < until_s:
            self._go_on(max(next_s, self.now_s))
            self.decide()

    def decide(self) -> None:
        view = self.view()
        outcome = cycle.decide(view, self.policy, self.state, self.settings)
        self.state, self.wake_s = outcome.state, outcome.wake_s
        for number, workers in zip(view.job.tolist(), outcome.workers.tolist(), strict=True):
            self._give(self.there[number], workers)

    def view(self) -> Snapshot:
        some = [self.there[number] for number in sorted(self.there)]
        view = view_of(self.slots, [one.row(self.now_s) for one in some], self.now_s)
        return msgspec.structs.replace(
            view,
            job=np.array([one.number for one in some], np.int64),
            unproven=np.array([self._is_unproven(one) for one in some], np.bool_),
        )

    def _is_unproven(self, one: Program) -> bool:
        joined = one.kind == "joins" and self.now_s - one.launched_s >= JOINS_S
        return one.kind in ("joins", "never-joins") and not joined

    def _next_s(self) -> float:
        ends_s = min((one.ends_s(self.now_s) for one in self.there.values()), default=math.inf)
        comes_s = self.coming[0].arrives_s if self.coming else math.inf
        return min(ends_s, comes_s, max(self.wake_s, self.now_s + START_S), self.now_s + POLL_S)

    def _go_on(self, to_s: float) -> None:
        for one in self.there.values():
            one.done_s += one.speed() * (to_s - self.now_s)
        self.now_s = to_s
        self.there = {n: one for n, one in self.there.items() if one.done_s < one.lasts_s - 1e-6}
        while self.coming and self.coming[0].arrives_s <= to_s:
            one = self.coming.pop(0)
            self.there[one.number] = one

    def _give(self, one: Program, workers: int) -> None:
        if one.workers and one.workers != workers and one.loses:
            one.lost_s += one.done_s
            one.done_s = 0.0
        if workers and (not one.workers or (one.loses and workers != one.workers)):
            one.launched_s = self.now_s
            one.began_s = self.now_s if math.isnan(one.began_s) else one.began_s
        one.workers = workers
