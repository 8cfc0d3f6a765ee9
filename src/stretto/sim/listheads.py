"""Lists whose waiting jobs keep their order: a decision looks at one job per width.

A walk of the list changes nothing unless one of two things is true: the first waiting job of some width fits into
what the running jobs ahead of it leave, or the running jobs hold more than there is. So the walk is replaced by:
find whichever of the two comes first in the order, make that one change, look again. What is ahead of a job is found
by bisection in the running jobs of each width, which are kept in order.

Keys that fall need no updating. A running job is filed under key + rate x time, which stays the same, and all jobs of
one width fall at one rate.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from math import inf
from typing import Any, TypeAlias

from stretto.core.snapshot import History, Snapshot
from stretto.sim.active import Active
from stretto.sim.listrun import Run, World
from stretto.sim.machines import Machines
from stretto.sim.views import Views

Entry: TypeAlias = tuple[Any, int, int]
"""Key, place among equal keys, job: jobs go in the order of their entries."""

_EMPTY = 2**80
"""More than can ever be released."""

RUNNING = -(2**60)
"""Added to the place of running jobs where they go before waiting ones of the same key."""


class Section:
    """Running jobs of one width whose keys fall alike, in order; their entries hold key + fall x time."""

    __slots__ = ("entries", "fall", "need")

    def __init__(self, need: int, fall: int) -> None:
        self.need, self.fall = need, fall
        self.entries: list[Entry] = []


class Heads(Run):
    """One waiting queue per width; a single one where the walk stops at the first job that does not fit."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        n, rule = len(self.submit_s), self.rule
        self.lane = [0] * n if rule.admission == "stop" else self.need
        self.waiting: dict[int, list[Entry]] = {lane: [] for lane in set(self.lane)}
        self.released = 0
        """Milli-GPU given back so far by running jobs, or moved behind others in the order."""
        self.shut = dict.fromkeys(self.waiting, 0)
        """What must have been released before the first job of a lane can start: it is not looked at until then."""
        self.total = 0
        """Milli-GPU of the running jobs."""
        self.clock = 0
        """Now, in whole microseconds, where keys fall."""
        falls = rule.falls != "never"
        widths = sorted(set(self.need))
        self.still = {need: Section(need, 0) for need in widths}
        self.falling = {need: Section(need, need if rule.falls == "service" else 1) for need in widths if falls}
        self.sections = [*self.falling.values()]
        if rule.preempts and (not falls or any(self.pause_s)):
            self.sections += self.still.values()
        self.section: list[Section | None] = [None] * n
        self.entry: list[Entry] = [(key, j, j) for j, key in enumerate(self._keys())]
        """Of each active job: in its waiting queue, or in its section."""
        self.resting: list[tuple[float, int, int]] = []
        """A heap of the ends of the pauses of starts, with job and epoch: until then keys do not fall."""

    def _keys(self) -> list[Any]:
        """Every job's key at its submission."""
        if self.rule.falls == "never":
            keys: list[float] = self.rule.key(_everyone(self.world)).tolist()
            return keys
        left = [round(work / rate * 1e6) if rate else inf for work, rate in zip(self.left, self.rate, strict=True)]
        if self.rule.falls == "time":
            return left
        return [us * need if us < inf else inf for us, need in zip(left, self.need, strict=True)]

    def arrive(self, j: int) -> None:
        self.wait(j, self.entry[j])

    def leave(self, j: int) -> None:
        self.take_out(j)

    def decide(self) -> None:
        if self.falling:
            self.clock = round(self.now_s * 1e6)
            while self.resting and self.resting[0][0] <= self.now_s:
                self._wake_up(*heappop(self.resting))
        while self._change():
            pass

    def _change(self) -> bool:
        """Make the first change that the walk would make, if there is any."""
        best = self._first_start()
        if self.total > self.room:
            over, missing = self._first_over()
            if best is None or over < best:
                j = over[2]
                self.stop(j, self.need[j] - missing)
                self.take_out(j)
                self.wait(j, over, missing)
                return True
        if best is None:
            return False
        j = best[2]
        self.start(j, self._free_at(best))
        heappop(self.waiting[self.lane[j]])
        self.put_in(j, best)
        return True

    def _first_start(self) -> Entry | None:
        """The first in order of the waiting jobs that fit at their turns."""
        best = None
        released = self.released
        for lane, enough in self.shut.items():
            if enough <= released:
                head = self._head(self.waiting[lane])
                if head is None:
                    self.shut[lane] = _EMPTY
                    continue
                missing = self._missing(head)
                if missing > 0:
                    self.shut[lane] = released + missing
                elif best is None or head < best:
                    best = head
        return best

    def _head(self, queue: list[Entry]) -> Entry | None:
        while queue and self.entry[queue[0][2]] is not queue[0]:
            heappop(queue)
        return queue[0] if queue else None

    def _missing(self, entry: Entry) -> int:
        """Milli-GPU that this job lacks at its turn."""
        need = self.need[entry[2]]
        missing = self.total + need - self.room
        if missing <= 0 or not self.sections:
            return missing
        return self._ahead(entry) + need - self.room

    def _ahead(self, entry: Entry) -> int:
        """Milli-GPU of the running jobs that go before this one."""
        key, place, _ = entry
        ahead = 0
        for section in self.sections:
            if section.entries:
                ahead += section.need * bisect_left(section.entries, (key + section.fall * self.clock, place))
        return ahead

    def _free_at(self, entry: Entry) -> int:
        """What is free at the turn of this job, if anybody wants to know."""
        if not self.world.settings.record:
            return 0
        return self.room - (self._ahead(entry) if self.sections else self.total)

    def _first_over(self) -> tuple[Entry, int]:
        """The first running job that does not fit behind those before it, and what it lacks; found from the end."""
        over = self.total - self.room
        ends = [len(section.entries) for section in self.sections]
        while True:
            last: Entry = (-inf, 0, 0)
            which = -1
            for i, section in enumerate(self.sections):
                if ends[i]:
                    key, place, j = section.entries[ends[i] - 1]
                    entry = (key - section.fall * self.clock, place, j)
                    if entry > last:
                        last, which = entry, i
            ends[which] -= 1
            need = self.sections[which].need
            if over <= need:
                return last, over
            over -= need

    # Filing.

    def wait(self, j: int, entry: Entry, missing: int = 0) -> None:
        """File a job among the waiting; it is known to miss that many milli-GPU."""
        self.entry[j] = entry
        queue = self.waiting[self.lane[j]]
        heappush(queue, entry)
        if queue[0] is entry:
            self.shut[self.lane[j]] = self.released + missing

    def put_in(self, j: int, entry: Entry) -> None:
        """File a job among the running."""
        need = self.need[j]
        self.total += need
        if not self.sections:
            return
        section = self.still[need]
        if self.falling:
            if self.pause_s[j] > 0:
                heappush(self.resting, (self.anchor_s[j], j, self.epoch[j]))
            else:
                section = self.falling[need]
                entry = (entry[0] + section.fall * self.clock, entry[1], j)
        self.section[j], self.entry[j] = section, entry
        insort(section.entries, entry)

    def take_out(self, j: int) -> None:
        """The opposite."""
        self.total -= self.need[j]
        self.released += self.need[j]
        section = self.section[j]
        if section is not None:
            del section.entries[bisect_left(section.entries, self.entry[j])]
            self.section[j] = None

    def _wake_up(self, anchor_s: float, j: int, epoch: int) -> None:
        """The pause of its start is over: its key falls from then on."""
        if self.epoch[j] != epoch or j not in self.running:
            return
        key, place, _ = self.entry[j]
        self.take_out(j)
        self.total += self.need[j]
        section = self.falling[self.need[j]]
        self.section[j] = section
        self.entry[j] = (key + section.fall * round(anchor_s * 1e6), place, j)
        insort(section.entries, self.entry[j])


class Partitioned(Heads):
    """Running jobs go before waiting ones of the same key, from the decision after their start on."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.loose: list[int] = []
        """Running jobs that still stand among the waiting in the order."""
        self.stopped: list[int] = []

    def start(self, j: int, free_milli: int) -> None:
        super().start(j, free_milli)
        self.loose.append(j)

    def stop(self, j: int, free_milli: int) -> None:
        super().stop(j, free_milli)
        self.stopped.append(j)

    def decide(self) -> None:
        super().decide()
        self._settle()

    def _settle(self) -> None:
        """Put every job that was started or stopped where it stands in the next walk."""
        loose, stopped = self.loose, self.stopped
        if loose:
            still = [j for j in loose if j in self.running]
            for j in sorted(still, key=self.entry.__getitem__):
                self.take_out(j)
                self.put_in(j, (self.entry[j][0], self.running_place(j), j))
            self.loose = []
        if stopped:
            for j in sorted(stopped, key=self.entry.__getitem__, reverse=True):
                if self.entry[j][1] < 0:
                    self.wait(j, (self.entry[j][0], self.waiting_place(j), j))
            self.stopped = []

    def running_place(self, j: int) -> int:
        """Its place among the running jobs of its key."""
        return j + RUNNING

    def waiting_place(self, j: int) -> int:
        """Its place among the waiting jobs of its key, now that it was stopped."""
        return j


def _everyone(world: World) -> Snapshot:
    """All jobs of the trace in one snapshot, as if none had started."""
    now_s = float(world.trace.submit_s[-1])
    jobs = Active(world.trace, world.settings)
    jobs.admit(now_s)
    machines = Machines(world.pools, world.nodes, failures=())
    return Views(world.trace, world.settings).snapshot(now_s, jobs, machines, History())
