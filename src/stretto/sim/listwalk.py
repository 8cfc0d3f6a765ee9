"""Lists whose order has to be made anew in each decision: the lists are kept, sorted and walked.

For the ties of Tiresias' own simulator, which depend on the list's last order, and for indices that change with
every second of service.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

from stretto.core.snapshot import GPU
from stretto.sim.listrun import Run, World


class Walk(Run):
    """A list per queue (one if there are no levels), each in order."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        n, levels = len(self.submit_s), self.rule.levels
        self.levels = levels
        self.lists: list[list[int]] = [[] for _ in range(len(levels.limits) + 1 if levels else 1)]
        self.active: dict[int, None] = {}
        """In order of job number."""
        self.level = [0] * n
        self.serves = [need / GPU if levels is None or levels.counts == "gpu" else 1.0 for need in self.need]
        self.ran_s, self.waited_s = [0.0] * n, [0.0] * n
        """Since the last promotion, up to the last change."""
        self.key: list[Any] = [math.inf] * n

    def arrive(self, j: int) -> None:
        self.active[j] = None
        self.lists[0].append(j)
        self._rank(j)

    def leave(self, j: int) -> None:
        del self.active[j]
        self.lists[self.level[j]].remove(j)

    def decide(self) -> None:
        if self.levels:
            self._change_queues()
        for j in self.running:
            self._rank(j)
        for queue in self.lists:
            queue.sort(key=self.key.__getitem__)
        self._walk()
        if self.levels:
            if self.levels.original:
                for queue in self.lists:
                    queue.sort(key=lambda j: j not in self.running)
            self.wake_s = self._next_change()

    def _rank(self, j: int) -> None:
        """The key by which a list is sorted; the sort keeps the order of equal keys."""
        if self.levels is None:
            remaining_s = self._remaining_s(j)
            key = round(remaining_s * 1e6) if remaining_s < math.inf else math.inf
            self.key[j] = key * self.need[j] / GPU if self.rule.falls == "service" else key
        else:
            rank = self.levels.rank(self._ran_now(j) * self.serves[j], self.level[j])
            self.key[j] = (rank, self.submit_s[j], 0 if self.levels.original else j)

    def _remaining_s(self, j: int) -> float:
        left = self.left_now(j) if j in self.running else self.left[j]
        if not left:
            return 0.0
        return left / self.rate[j] if self.rate[j] else math.inf

    def _walk(self) -> None:
        free, narrowest = self.room, min(self.need)
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
            if free < narrowest:
                break
        for j in behind:
            self.stop(j, free)
        for j, left in starts:
            self.start(j, left)

    # Queues.

    def start(self, j: int, free_milli: int) -> None:
        if self.ran_s[j]:
            self.waited_s[j] += self.now_s - self.changed_s[j]
        super().start(j, free_milli)

    def stop(self, j: int, free_milli: int) -> None:
        self.ran_s[j] += self.now_s - self.changed_s[j]
        super().stop(j, free_milli)

    def _ran_now(self, j: int) -> float:
        return self.ran_s[j] + (self.now_s - self.changed_s[j] if j in self.running else 0.0)

    def _waited_now(self, j: int) -> float:
        return self.waited_s[j] + (self.now_s - self.changed_s[j] if self.ran_s[j] else 0.0)

    def _change_queues(self) -> None:
        assert self.levels is not None
        for j in self.active if self.levels.promote else sorted(self.running):
            level = self.level[j]
            if j in self.running:
                while self._crossing_s(j, level) <= self.now_s:
                    level += 1
                    if self.levels.original:
                        break
                if level != self.level[j]:
                    self._move(j, level)
            elif level and self._promotion_s(j) <= self.now_s:
                self.ran_s[j] = self.waited_s[j] = 0.0
                self.changed_s[j] = self.now_s
                self._move(j, 0)

    def _move(self, j: int, level: int) -> None:
        self.lists[self.level[j]].remove(j)
        self.level[j] = level
        self.lists[level].append(j)
        self._rank(j)

    def _crossing_s(self, j: int, level: int) -> float:
        assert self.levels is not None
        return self.levels.crossing_s(self.now_s, level, self._ran_now(j) * self.serves[j], self.serves[j])

    def _promotion_s(self, j: int) -> float:
        assert self.levels is not None
        return self.levels.promotion_s(self.now_s, self.level[j], self.ran_s[j], self._waited_now(j))

    def _next_change(self) -> float:
        assert self.levels is not None
        moments = []
        for j in self.running:
            ran_s, serves = self._ran_now(j), self.serves[j]
            moments.append(self.levels.visit_s(self.now_s, self.level[j], ran_s * serves, serves, ran_s))
        if self.levels.promote:
            moments += [self._promotion_s(j) for j in self.active if j not in self.running]
        return min((moment for moment in moments if moment > self.now_s), default=math.inf)
