"""Multi-level queues, incrementally: jobs change queues at moments that are known when they start or stop.

The order is (queue, place): places of running jobs come before those of waiting ones, a stopped job goes to the front
of the waiting places, everyone else to the end. So, between changes, the order of waiting jobs stands still, and
decisions are found as in `listheads`.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from stretto.core.snapshot import GPU
from stretto.sim.listheads import RUNNING, Partitioned
from stretto.sim.listrun import World


class LevelHeads(Partitioned):
    """The key of an entry is the job's queue."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert self.rule.levels is not None
        n = len(self.submit_s)
        self.levels = self.rule.levels
        by_gpu = self.levels.counts == "gpu"
        self.serves = [need / GPU if by_gpu else 1.0 for need in self.need]
        """Service that each job attains per second."""
        self.ran_s, self.waited_s = [0.0] * n, [0.0] * n
        """Since the last promotion, up to the last change."""
        self.stamp = [0] * n
        """Counts changes of state or queue; what was queued under an earlier stamp is void."""
        self.crossings: list[tuple[float, int, int]] = []
        self.promotions: list[tuple[float, int, int]] = []
        self.due: list[tuple[float, int, int]] = []
        """Changes that came due in the decision itself: for the next event, whenever it is."""
        self.visits: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
        """In the original, by width and queue: when each running job would have started had it run without a break."""
        self.tail, self.front, self.last_running = -RUNNING, -RUNNING, RUNNING

    def arrive(self, j: int) -> None:
        self.wait(j, (0, self._next_tail(), j))

    def decide(self) -> None:
        self._change_queues()
        super().decide()
        self.wake_s = self._next_change()

    def start(self, j: int, free_milli: int) -> None:
        if self.ran_s[j]:
            self.waited_s[j] += self.now_s - self.changed_s[j]
        super().start(j, free_milli)
        self._expect_crossing(j, self.entry[j][0])

    def stop(self, j: int, free_milli: int) -> None:
        self.ran_s[j] += self.now_s - self.changed_s[j]
        super().stop(j, free_milli)
        at_s = self.levels.promotion_s(self.now_s, self.entry[j][0], self.ran_s[j], self.waited_s[j])
        self._expect(self.promotions, at_s, j)

    def running_place(self, j: int) -> int:
        self.last_running += 1
        return self.last_running

    def waiting_place(self, j: int) -> int:
        self.front -= 1
        return self.front

    def _next_tail(self) -> int:
        self.tail += 1
        return self.tail

    # Changes of queues.

    def _change_queues(self) -> None:
        """Demotions and promotions that are due, by job number."""
        due, self.due = self.due, []
        for heap in (self.crossings, self.promotions):
            while heap and heap[0][0] <= self.now_s:
                due.append(heappop(heap))
        for j in sorted(j for _, j, stamp in due if self.stamp[j] == stamp):
            if j in self.running:
                self._demote(j)
            else:
                self._promote(j)

    def _demote(self, j: int) -> None:
        level = self.entry[j][0] + 1
        while not self.levels.original and self._crossing_s(j, level) <= self.now_s:
            level += 1
        self.take_out(j)
        self.put_in(j, (level, self._next_tail(), j))
        self.loose.append(j)
        self._expect_crossing(j, level)

    def _promote(self, j: int) -> None:
        self.stamp[j] += 1
        self.ran_s[j] = self.waited_s[j] = 0.0
        self.changed_s[j] = self.now_s
        self.wait(j, (0, self._next_tail(), j))

    def _expect_crossing(self, j: int, level: int) -> None:
        self._expect(self.crossings, self._crossing_s(j, level), j)
        if self.levels.original and level < len(self.levels.limits):
            began_s = self.changed_s[j] - self.ran_s[j]
            heappush(self.visits.setdefault((self.need[j], level), []), (began_s, j, self.stamp[j]))

    def _crossing_s(self, j: int, level: int) -> float:
        ran_s = self.ran_s[j] + self.now_s - self.changed_s[j]
        return self.levels.crossing_s(self.now_s, level, ran_s * self.serves[j], self.serves[j])

    def _expect(self, heap: list[tuple[float, int, int]], at_s: float, j: int) -> None:
        self.stamp[j] += 1
        if at_s <= self.now_s:
            self.due.append((at_s, j, self.stamp[j]))
        elif at_s < math.inf:
            heappush(heap, (at_s, j, self.stamp[j]))

    def _next_change(self) -> float:
        heaps = [self.promotions] if self.levels.original else [self.promotions, self.crossings]
        moments = [heap[0][0] for heap in heaps if self._first(heap)]
        for (_, level), heap in self.visits.items():
            if self._first(heap):
                began_s, j, _ = heap[0]
                ran_s, serves = self.now_s - began_s, self.serves[j]
                moments.append(self.levels.visit_s(self.now_s, level, ran_s * serves, serves, ran_s))
        return min(moments, default=math.inf)

    def _first(self, heap: list[tuple[float, int, int]]) -> bool:
        """Whether anything is left after dropping what is void."""
        while heap and self.stamp[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return bool(heap)

    def leave(self, j: int) -> None:
        self.stamp[j] += 1
        super().leave(j)
