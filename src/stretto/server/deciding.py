"""One decision: a snapshot in, seats for every job out, each with its reason. Pure.

1. The policy says how many workers each job gets; what it must not say is an error and changes nothing.
2. Resizes that do not pay are dropped (`core.plan.settle`).
3. The placement says on which nodes; whoever does not fit gets fewer, and is told so.
4. Devices: who has a seat keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from stretto.core import asking, placement, plan, reasons, services, steps
from stretto.core.decision import Decision, Memory
from stretto.core.placement import devices
from stretto.core.policy import Policy
from stretto.core.snapshot import GPU, IntArray, Snapshot
from stretto.jobs.model import Seat
from stretto.server.book import Reasoned


class Ground(NamedTuple):
    """Why a job has the workers it has: a code of `core.reasons` and the two numbers that decided."""

    code: int
    first: float = 0.0
    second: float = 0.0
    unit: str = "GPU"
    """What a device is called."""

    @property
    def name(self) -> str:
        return reasons.name(self.code)

    @property
    def text(self) -> str:
        return reasons.explain(self.code, self.first, self.second).replace("GPU", self.unit)


class Verdict(NamedTuple):
    """What one job should have from now on."""

    seats: tuple[Seat, ...]
    pool: int
    ground: Reasoned
    rejected: bool = False


class Outcome(msgspec.Struct, frozen=True):
    verdicts: dict[int, Verdict]
    """By job number."""
    memory: Memory
    wake_s: float


Seating: TypeAlias = Callable[[Snapshot, IntArray, IntArray], dict[int, tuple[Seat, ...]]]
"""(view, [job, node] workers, pool) -> the seats of every job that has some, by job number."""

_TRIES = 3


def decide(policy: Policy, memory: Memory, place: str, view: Snapshot, seating: Seating) -> Outcome:
    """Raises `PolicyError` and the like."""
    if not len(view):
        return Outcome({}, memory, math.inf)
    decision, placed = _placed(policy, memory, place, view)
    seats = seating(view, placed, decision.pool)
    free = float(view.capacity.sum() - (placed.sum(axis=1) * view.width).sum()) / GPU
    turned_away = np.zeros(len(view), np.bool_) if decision.rejected is None else decision.rejected
    detail = decision.detail[:, 0], decision.detail[:, 1]
    columns = (view.job, placed.sum(axis=1), decision.workers, decision.pool, decision.reason, *detail, turned_away)
    verdicts: dict[int, Verdict] = {}
    same: dict[tuple[object, ...], Verdict] = {}
    for number, got, wish, pool, code, first, second, gone in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if got != wish:
            code, first, second = reasons.fragmented(wish, got, free)
        its = seats.get(number, ())
        # Most of a long queue waits for the same reason.
        verdict = same.get(key := (its, pool, code, first, second, gone))
        if verdict is None:
            ground = Ground(code, first, second, "slot" if view.pools[max(pool, 0)] == "cpu" else "GPU")
            verdict = same[key] = Verdict(its, pool, ground, gone)
        verdicts[number] = verdict
    return Outcome(verdicts, decision.memory, decision.wake_s)


def _placed(policy: Policy, memory: Memory, place: str, view: Snapshot) -> tuple[Decision, IntArray]:
    """What the policy says, and where that is. A policy counts devices and does not see who can reach them: it is asked
    again with what a job can have at most, so that the others get the rest."""
    for _ in range(_TRIES):
        decision = plan.settle(view, asking.ask(policy, view, memory))
        if decision.nodes is not None and view.reach is None:
            return decision, decision.nodes
        placed = _place(place, view, decision)
        got = placed.sum(axis=1)
        short = (got < decision.workers) & (got >= view.min_workers)
        if view.reach is None or not short.any():
            break
        high = np.where(short, got, view.max_workers)
        view = msgspec.structs.replace(view, max_workers=high, requested=np.minimum(view.requested, high))
    return decision, placed


def _place(place: str, view: Snapshot, decision: Decision) -> IntArray:
    """[job, node] workers. Who has none and gets none is no concern of a placement: that is most of a long queue."""
    concerned = (decision.workers > 0) | view.placed.any(axis=1)
    some = services.only(view, concerned)
    placed = np.zeros((len(view), len(view.nodes.name)), np.int64)
    found = placement.load(place)(some, decision.workers[concerned], decision.pool[concerned])
    placed[concerned] = steps.trimmed(some, found)
    return placed


def on_nodes(view: Snapshot, placed: IntArray, pool: IntArray) -> dict[int, tuple[Seat, ...]]:
    """Seats on nodes that choose the devices themselves."""
    found: dict[int, list[Seat]] = {}
    for j, node in zip(*(axis.tolist() for axis in np.nonzero(placed)), strict=True):
        found.setdefault(int(view.job[j]), []).extend([Seat(view.nodes.name[node])] * int(placed[j, node]))
    return {number: tuple(some) for number, some in found.items()}


def on_devices(
    held: Mapping[int, Sequence[Seat]], view: Snapshot, placed: IntArray, pool: IntArray
) -> dict[int, tuple[Seat, ...]]:
    """Seats with the devices of every worker. `held` are those that jobs have now, by number: they keep them."""
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
