"""From targets and living workers to what is to be done now. Pure, and the same answer however often it is asked.

Order: stop, shrink, start, grow. A seat goes to a newcomer only when no other worker lives on it; who has to wait for
that waits, and is looked at again when somebody ends.

- A *stop* asks all workers of a job to end; it goes on when they have.
- An *elastic* job keeps every worker whose seat it still has. One that moves starts the newcomer first, and lets the
  old worker go when the newcomer is a member. Only where somebody else waits for the seat does it leave at once; and
  two jobs that wait for each other's last seat are untied by stopping one.
- A *group* (restart, rigid) changes as a whole: all end, then all start.
- A *service* is elastic without a coordinator: a replica counts once it serves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from stretto.jobs.model import Level, Seat, Worker


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """One job: what it should have and what it has."""

    job: int
    level: Level
    target: tuple[Seat, ...]
    workers: tuple[Worker, ...] = ()
    joined: frozenset[str] = frozenset()
    """Names of workers that take part: members, replicas that serve."""
    width_milli: int = 1000
    paused: bool = False
    """Nothing is launched for now (back-off)."""
    ending: bool = False
    """Its workers end by themselves: none is launched in their place, none is asked to leave."""
    why: str = ""
    """What leavers are told."""

    @property
    def is_settled(self) -> bool:
        """It has exactly what it should have, and nobody leaves."""
        seats = tuple([worker.seat for worker in self.workers if not worker.leaving])
        return len(seats) == len(self.workers) and seats == self.target


class Stop(msgspec.Struct, frozen=True):
    """All workers are asked to end, and the job as a whole goes on later, or not."""

    job: int
    workers: tuple[str, ...]


class Shrink(msgspec.Struct, frozen=True):
    """These workers are asked to leave; so many stay."""

    job: int
    workers: tuple[str, ...]
    left: int


class Start(msgspec.Struct, frozen=True):
    """A job without workers gets these."""

    job: int
    seats: tuple[Seat, ...]


class Grow(msgspec.Struct, frozen=True):
    """These join those it has."""

    job: int
    seats: tuple[Seat, ...]


Action: TypeAlias = Stop | Shrink | Start | Grow

_DEVICE = 1000


class Floor(Protocol):
    """What is free at this moment, beside all workers that live."""

    def fits(self, s: Situation, seat: Seat) -> bool: ...

    def take(self, s: Situation, seat: Seat) -> None: ...

    def give(self, s: Situation, seat: Seat) -> None:
        """What was taken."""

    def awaited(self, s: Situation, seat: Seat) -> list[int]:
        """The others that wait for this seat, by job number."""


def actions(situations: Sequence[Situation], floor_of: Callable[[Sequence[Situation]], Floor]) -> tuple[Action, ...]:
    """What to do now, in this order."""
    unsettled = [s for s in situations if not s.is_settled]
    if not unsettled:
        return ()
    floor = floor_of(situations)
    stops: list[Action] = []
    shrinks: list[Action] = []
    for s in unsettled:
        staying = [worker for worker in s.workers if not worker.leaving]
        if not staying or (s.ending and s.target):
            continue
        if _ends_whole(s, staying):
            stops.append(Stop(s.job, tuple(worker.name for worker in staying)))
        elif leavers := _leavers(s, staying, floor):
            if len(leavers) == len(staying):
                stops.append(Stop(s.job, leavers))
            else:
                shrinks.append(Shrink(s.job, leavers, len(staying) - len(leavers)))
    starts: list[Action] = []
    grows: list[Action] = []
    for s in unsettled:
        if s.paused or s.ending:
            continue
        seats = _missing(s, floor)
        if seats and s.workers:
            grows.append(Grow(s.job, seats))
        elif seats:
            starts.append(Start(s.job, seats))
    return (*stops, *shrinks, *starts, *grows)


class Devices:
    """A floor on which every device is known: who lives where, in milli."""

    def __init__(self, situations: Iterable[Situation]) -> None:
        self.used: Counter[tuple[str, int]] = Counter()
        self.wanted: dict[tuple[str, int], set[int]] = {}
        """Jobs that have not got a seat on this device yet."""
        for s in situations:
            for worker in s.workers:
                self.take(s, worker.seat)
            for seat in uncovered(s.target, (worker.seat for worker in s.workers)):
                for device in seat.devices:
                    self.wanted.setdefault((seat.node, device), set()).add(s.job)

    def fits(self, s: Situation, seat: Seat) -> bool:
        return all(self.used[seat.node, device] + _milli(s) <= _DEVICE for device in seat.devices)

    def take(self, s: Situation, seat: Seat) -> None:
        for device in seat.devices:
            self.used[seat.node, device] += _milli(s)

    def give(self, s: Situation, seat: Seat) -> None:
        for device in seat.devices:
            self.used[seat.node, device] -= _milli(s)

    def awaited(self, s: Situation, seat: Seat) -> list[int]:
        return [job for device in seat.devices for job in self.wanted.get((seat.node, device), ()) if job != s.job]


def _milli(s: Situation) -> int:
    return s.width_milli if 0 < s.width_milli < _DEVICE else _DEVICE


def _ends_whole(s: Situation, staying: Sequence[Worker]) -> bool:
    if not s.target:
        return True
    is_group = s.level in ("restart", "rigid")
    changed = Counter(worker.seat for worker in staying) != Counter(s.target)
    # A group that already loses members ends and starts as a whole; one that is complete is left alone.
    return is_group and (changed or len(staying) < len(s.workers))


def _leavers(s: Situation, staying: Sequence[Worker], floor: Floor) -> tuple[str, ...]:
    """Who of a job that resizes in process leaves now."""
    kept = Counter(s.target)
    surplus: list[Worker] = []
    # Who came first stays: newcomers that are not needed any more have nothing to hand over.
    for worker in sorted(staying, key=lambda worker: (worker.name not in s.joined, worker.launched_s, worker.name)):
        if kept[worker.seat] > 0:
            kept[worker.seat] -= 1
        else:
            surplus.append(worker)
    leaving: list[str] = []
    members = [worker for worker in staying if worker.name in s.joined]
    spare = len(members) - len(s.target)
    for worker in reversed(surplus):
        if worker.name not in s.joined:
            leaving.append(worker.name)
            continue
        waiting = floor.awaited(s, worker.seat)
        # Two that wait for each other's only seat: the older one moves, the younger one is stopped for it.
        if spare > 0 or (waiting and (len(staying) - len(leaving) > 1 or min(waiting) < s.job)):
            leaving.append(worker.name)
            spare -= 1
    return tuple(leaving)


def _missing(s: Situation, floor: Floor) -> tuple[Seat, ...]:
    """The seats that can be taken now. A group starts whole or not at all."""
    if s.level in ("restart", "rigid"):
        return () if s.workers else _whole(s, floor)
    taken = []
    for seat in uncovered(s.target, (worker.seat for worker in s.workers if not worker.leaving)):
        if floor.fits(s, seat):
            floor.take(s, seat)
            taken.append(seat)
    return tuple(taken)


def _whole(s: Situation, floor: Floor) -> tuple[Seat, ...]:
    for i, seat in enumerate(s.target):
        if not floor.fits(s, seat):
            for before in s.target[:i]:
                floor.give(s, before)
            return ()
        floor.take(s, seat)
    return s.target


def uncovered(target: Iterable[Seat], seats: Iterable[Seat]) -> list[Seat]:
    """The seats of a target that nobody has yet."""
    wanted, taken = tuple(target), tuple(seats)
    return [] if wanted == taken else sorted((Counter(wanted) - Counter(taken)).elements())
