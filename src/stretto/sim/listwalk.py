"""Lists whose order has to be made anew in each decision: the lists are kept, sorted and walked.

For the ties of Tiresias' own simulator, which depend on the list's last order (`Walk`), and for queues sorted by an
index that changes with every second of service (`LevelWalk`).
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from stretto.core.snapshot import GPU
from stretto.sim.listlevels import Served
from stretto.sim.listrun import Run, World


class Walk(Run):
    """One list, sorted by keys that fall; the sort keeps the order of equal keys."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.lists: list[list[int]] = [[]]
        self.key: list[Any] = [math.inf] * len(self.submit_s)
        self.narrowest = min(self.need)

    def arrive(self, j: int) -> None:
        self.rank(j)
        self.lists[0].append(j)

    def leave(self, j: int) -> None:
        self.lists[0].remove(j)

    def decide(self) -> None:
        for j in self.running:
            self.rank(j)
        for queue in self.lists:
            queue.sort(key=self.key.__getitem__)
        self._walk()

    def rank(self, j: int) -> None:
        """Bring the key of a job up to date."""
        left, rate = self.left_now(j) if j in self.running else self.left[j], self.rate[j]
        key = round(left / rate * 1e6) if rate else math.inf
        self.key[j] = key * self.need[j] / GPU if self.rule.falls == "service" else key

    def _walk(self) -> None:
        free = self.room
        behind = set(self.running)
        starts: list[tuple[int, int]] = []
        for j in chain.from_iterable(self.lists):
            if self.need[j] <= free:
                if j in behind:
                    behind.remove(j)
                else:
                    starts.append((j, free))
                free -= self.need[j]
            elif j in behind:
                behind.remove(j)
                self.stop(j, free)
            if free < self.narrowest:
                break
        for j in behind:
            self.stop(j, free)
        for j, left in starts:
            self.start(j, left)


class LevelWalk(Served, Walk):
    """A list per queue, sorted by index and submission; then by job number, or as it was (original)."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.lists = [[] for _ in (*self.levels.limits, math.inf)]
        self.listed = [0] * len(self.submit_s)
        """The list that each job is in."""

    def leave(self, j: int) -> None:
        self.stamp[j] += 1
        self.lists[self.listed[j]].remove(j)

    def decide(self) -> None:
        for j in self.change_queues():
            self.lists[self.listed[j]].remove(j)
            self.listed[j] = self.level[j]
            self.lists[self.level[j]].append(j)
            self.rank(j)
        super().decide()
        if self.levels.original:
            for queue in self.lists:
                queue.sort(key=lambda j: j not in self.running)
        self.wake_s = self.next_change()

    def rank(self, j: int) -> None:
        ran_s = self.ran_now(j) if j in self.running else self.ran_s[j]
        rank = self.levels.rank(ran_s * self.serves[j], self.level[j])
        self.key[j] = (rank, self.submit_s[j], 0 if self.levels.original else j)
