"""What the cycle decided, as the loop carries it out: seats for every job, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from stretto.core import preempting, reasons, steps
from stretto.core.cores import CPU_POOL
from stretto.core.cycle import CycleState
from stretto.core.cycle import Outcome as Decided
from stretto.core.placement import devices
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot
from stretto.jobs.model import Seat
from stretto.server.book import Reasoned


class Ground(NamedTuple):
    """Why a job has the workers it has: a code of `core.reasons`, the two numbers that decided, and the names of the
    jobs that it is about."""

    code: int
    first: float = 0.0
    second: float = 0.0
    unit: str = "GPU"
    """What a device is called."""
    jobs: tuple[str, ...] = ()
    more: int = 0
    """How many others it is about."""

    @property
    def name(self) -> str:
        return reasons.name(self.code)

    @property
    def text(self) -> str:
        return reasons.explain(self.code, self.first, self.second, self.jobs, self.more).replace("GPU", self.unit)


class Verdict(NamedTuple):
    """What one job should have from now on."""

    seats: tuple[Seat, ...]
    pool: int
    ground: Reasoned
    rejected: bool = False


class Verdicts(msgspec.Struct, frozen=True):
    of: dict[int, Verdict]
    """By job number."""
    state: CycleState
    wake_s: float
    pinned: tuple[int, ...] = ()
    """Numbers of the jobs that run and would lose their work."""
    stranded: tuple[int, ...] = ()
    """Numbers of those that were asked to move and could not: work would have been lost for nothing."""


Seating: TypeAlias = Callable[[Snapshot, IntArray, IntArray], dict[int, tuple[Seat, ...]]]
"""(view, [job, node] workers, pool) -> the seats of every job that has some, by job number."""


def verdicts(view: Snapshot, decided: Decided, seating: Seating, names: Mapping[int, str]) -> Verdicts:
    """`names`: of the jobs, by number, for the reasons."""
    seats = seating(view, decided.placed, decided.pool)
    detail = decided.detail[:, 0], decided.detail[:, 1]
    columns = (
        view.job, view.width, decided.pool, decided.reason, *detail, decided.rejected, decided.about, decided.workers,
    )  # fmt: skip
    wide = dict(zip(view.job.tolist(), view.width.tolist(), strict=True))
    seated = sum(len(some) * wide[number] for number, some in seats.items())
    free = (view.total_milli - seated) / GPU
    found: dict[int, Verdict] = {}
    same: dict[tuple[object, ...], Verdict] = {}
    for number, width, pool, code, first, second, gone, about, size in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if len(seats.get(number, ())) < size:
            code, first, second = reasons.fragmented(size, len(seats.get(number, ())), free)
        *named, more = about
        its, jobs = seats.get(number, ()), tuple([names.get(n, f"job {n}") for n in named if n >= 0])
        # Most of a long queue waits for the same reason.
        verdict = same.get(key := (its, width > 0, pool, code, first, second, gone, jobs, more))
        if verdict is None:
            unit = "core" if not width else "slot" if view.pools[max(pool, 0)] == CPU_POOL else "GPU"
            verdict = same[key] = Verdict(its, pool, Ground(code, first, second, unit, jobs, more), gone)
        found[number] = verdict
    return Verdicts(found, decided.state, decided.wake_s, tuple(view.job[view.pinned].tolist()))


def in_vain(view: Snapshot, decided: Decided, found: Verdicts) -> BoolArray:
    """Who would be stopped for a more urgent job that has no seats all the same."""
    got = np.array([len(found.of[number].seats) for number in view.job.tolist()], np.int64)
    return preempting.in_vain(view, decided.reason, decided.about, decided.workers, got)


def on_nodes(view: Snapshot, placed: IntArray, pool: IntArray) -> dict[int, tuple[Seat, ...]]:
    """Seats on nodes that choose the devices themselves."""
    found: dict[int, list[Seat]] = {}
    for j, node in zip(*(axis.tolist() for axis in np.nonzero(placed)), strict=True):
        found.setdefault(int(view.job[j]), []).extend([Seat(view.nodes.name[node])] * int(placed[j, node]))
    return {number: tuple(some) for number, some in found.items()}


def on_devices(
    held: Mapping[int, Sequence[Seat]], view: Snapshot, placed: IntArray, pool: IntArray
) -> dict[int, tuple[Seat, ...]]:
    """Seats with the devices of every worker. `held` are those that jobs have now, by number: they keep them, unless a
    newcomer finds none otherwise. For pinned jobs there is no otherwise: then the newcomer does not come."""
    found = _dealt(held, view, placed, pool)
    for _ in range(len(view)):
        moved = _moved(held, view, placed, found)
        fewer = _without_newcomer(view, placed, moved) if moved else None
        if fewer is None:
            break
        placed = fewer
        found = _dealt(held, view, placed, pool)
    return found


def _moved(
    held: Mapping[int, Sequence[Seat]], view: Snapshot, placed: IntArray, found: Mapping[int, Sequence[Seat]]
) -> list[int]:
    """Rows of pinned jobs that stay where they are, but not on their devices."""
    stay = view.pinned & (placed == view.placed).all(axis=1)
    rows: list[int] = np.flatnonzero(stay).tolist()
    numbers = view.job.tolist()
    return [j for j in rows if sorted(found.get(numbers[j], ())) != sorted(held.get(numbers[j], ()))]


def _without_newcomer(view: Snapshot, placed: IntArray, moved: Sequence[int]) -> IntArray | None:
    """The places without what the least urgent and latest of the others gained on the nodes of these; None: nobody."""
    nodes = placed[moved].any(axis=0)
    gains = (placed > view.placed) & nodes & ~view.pinned[:, None]
    rows = np.flatnonzero(gains.any(axis=1))
    if not len(rows):
        return None
    last = rows[np.lexsort((-view.job[rows], view.priority[rows]))[0]]
    fewer = placed.copy()
    fewer[last] = np.where(gains[last], view.placed[last], placed[last])
    fewer = steps.trimmed(view, fewer)
    if fewer[last].sum() < view.min_workers[last]:
        fewer[last] = 0
    return fewer


def _dealt(
    held: Mapping[int, Sequence[Seat]], view: Snapshot, placed: IntArray, pool: IntArray
) -> dict[int, tuple[Seat, ...]]:
    at = {name: i for i, name in enumerate(view.nodes.name)}
    row = {number: j for j, number in enumerate(view.job.tolist()) if number in held}
    taken = []
    for number, seats in held.items():
        if number not in row:
            continue
        j = row[number]
        shared = 0 < int(view.width[j]) < GPU
        for seat in seats:
            if seat.node in at:
                milli = int(view.width[j]) if shared else (GPU if seat.devices else 0)
                mib = -(-int(view.demand[j, 2]) // max(len(seat.devices), 1))
                taken.append(devices.Seat(at[seat.node], number, False, seat.devices, milli, mib))
    found: dict[int, list[Seat]] = {}
    for one in devices.assign(view, placed, np.where(pool < 0, 0, pool), taken):
        if not one.role:
            found.setdefault(one.job, []).append(Seat(view.nodes.name[one.node], one.devices))
    return {number: tuple(some) for number, some in found.items()}
