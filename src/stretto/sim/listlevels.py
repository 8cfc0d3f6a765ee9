"""Multi-level queues, incrementally: jobs change queues at moments that are known when they start or stop.

`Served` counts service and keeps these moments. `LevelHeads` adds the order for queues without an index, which is
(queue, place): places of running jobs come before those of waiting ones, a stopped job goes to the front of the waiting
places, everyone else to the end. Between changes the order of waiting jobs stands still, and decisions are found as
in `listheads`.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TypeAlias

from stretto.core.snapshot import GPU
from stretto.sim.listheads import RUNNING, Partitioned
from stretto.sim.listrun import Run, World

Moment: TypeAlias = tuple[float, int, int]
"""When, job, and the stamp under which that was foreseen."""


class Served(Run):
    """Attained service and queue of every job, and when they change queues."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        assert self.rule.levels is not None
        n = len(self.submit_s)
        self.levels = self.rule.levels
        self.level = [0] * n
        by_gpu = self.levels.counts == "gpu"
        self.serves = [need / GPU if by_gpu else 1.0 for need in self.need]
        """Service that each job attains per second."""
        self.ran_s, self.waited_s = [0.0] * n, [0.0] * n
        """Since the last promotion, up to the last change."""
        self.stamp = [0] * n
        """Counts changes of state or queue; what was foreseen under an earlier stamp is void."""
        self.crossings: list[Moment] = []
        self.promotions: list[Moment] = []
        self.due: list[Moment] = []
        """Changes that came due in a decision itself: for the next event, whenever it is."""
        self.visits: dict[tuple[int, int], list[Moment]] = {}
        """In the original, by width and queue: when each running job would have started, had it run without a break."""

    def start(self, j: int, free_milli: int) -> None:
        if self.ran_s[j]:
            self.waited_s[j] += self.now_s - self.changed_s[j]
        super().start(j, free_milli)
        self._foresee_crossing(j)

    def stop(self, j: int, free_milli: int) -> None:
        self.ran_s[j] = self.ran_now(j)
        super().stop(j, free_milli)
        at_s = self.levels.promotion_s(self.now_s, self.level[j], self.ran_s[j], self.waited_s[j])
        self._foresee(self.promotions, at_s, j)

    def ran_now(self, j: int) -> float:
        """How long a running job has run since its last promotion."""
        return self.ran_s[j] + self.now_s - self.changed_s[j]

    def change_queues(self) -> list[int]:
        """Demote and promote whose time has come; these jobs, by number."""
        due, self.due = self.due, []
        for heap in (self.crossings, self.promotions):
            while heap and heap[0][0] <= self.now_s:
                due.append(heappop(heap))
        moved = sorted(j for _, j, stamp in due if self.stamp[j] == stamp)
        for j in moved:
            if j in self.running:
                self._demote(j)
            else:
                self._promote(j)
        return moved

    def next_change(self) -> float:
        """When the next job changes queues, or is looked at by the original for that purpose."""
        heaps = [self.promotions] if self.levels.original else [self.promotions, self.crossings]
        moments = [heap[0][0] for heap in heaps if self._any_left(heap)]
        for (_, level), heap in self.visits.items():
            if self._any_left(heap):
                began_s, j, _ = heap[0]
                ran_s, serves = self.now_s - began_s, self.serves[j]
                moments.append(self.levels.visit_s(self.now_s, level, ran_s * serves, serves, ran_s))
        return min(moments, default=math.inf)

    def _demote(self, j: int) -> None:
        self.level[j] += 1
        while not self.levels.original and self._crossing_s(j) <= self.now_s:
            self.level[j] += 1
        self._foresee_crossing(j)

    def _promote(self, j: int) -> None:
        self.stamp[j] += 1
        self.level[j] = 0
        self.ran_s[j] = self.waited_s[j] = 0.0
        self.changed_s[j] = self.now_s

    def _crossing_s(self, j: int) -> float:
        serves = self.serves[j]
        return self.levels.crossing_s(self.now_s, self.level[j], self.ran_now(j) * serves, serves)

    def _foresee_crossing(self, j: int) -> None:
        self._foresee(self.crossings, self._crossing_s(j), j)
        level = self.level[j]
        if self.levels.original and level < len(self.levels.limits):
            began_s = self.changed_s[j] - self.ran_s[j]
            heappush(self.visits.setdefault((self.need[j], level), []), (began_s, j, self.stamp[j]))

    def _foresee(self, heap: list[Moment], at_s: float, j: int) -> None:
        self.stamp[j] += 1
        if at_s <= self.now_s:
            self.due.append((at_s, j, self.stamp[j]))
        elif at_s < math.inf:
            heappush(heap, (at_s, j, self.stamp[j]))

    def _any_left(self, heap: list[Moment]) -> bool:
        """Whether anything is left after dropping what is void."""
        while heap and self.stamp[heap[0][1]] != heap[0][2]:
            heappop(heap)
        return bool(heap)


class LevelHeads(Served, Partitioned):
    """The key of an entry is the job's queue."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.tail, self.front, self.last_running = -RUNNING, -RUNNING, RUNNING

    def arrive(self, j: int) -> None:
        self.wait(j, self._at_tail(j))

    def leave(self, j: int) -> None:
        self.stamp[j] += 1
        super().leave(j)

    def decide(self) -> None:
        for j in self.change_queues():
            if j in self.running:
                self.take_out(j)
                self.put_in(j, self._at_tail(j))
                self.loose.append(j)
            else:
                self.wait(j, self._at_tail(j))
        super().decide()
        self.wake_s = self.next_change()

    def running_place(self, j: int) -> int:
        self.last_running += 1
        return self.last_running

    def waiting_place(self, j: int) -> int:
        self.front -= 1
        return self.front

    def _at_tail(self, j: int) -> tuple[int, int, int]:
        self.tail += 1
        return self.level[j], self.tail, j
