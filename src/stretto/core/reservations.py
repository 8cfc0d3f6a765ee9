"""Nobody starves behind jobs that may not be stopped: whoever is late gets a reservation.

A wide job could wait for ever behind small ones that keep coming, because each of them, once it runs, is pinned. So
the cycle remembers since when each job was kept from starting by pinned ones (`Blocked`). After `reserve_after_s` the
first of them, by priority and then by that time, has a *reservation*: jobs that would be pinned once they run start
before it only if they are more urgent, are expected to end before its room is free, or fit beside it. Jobs that keep
their progress may start: they give way when their room is needed.

The bound: with a reservation a job waits no longer than the fragile jobs that run at that moment, plus those with
reservations before it. A length is a hint and never kills: a job that outlives it counts as long again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from stretto.core.estimate.remaining import expected_steps
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot


class Wait(msgspec.Struct, frozen=True):
    """A job that pinned ones keep from starting."""

    since_s: float
    no_place: bool = False
    """There was room enough for it last time, but in pieces."""


Blocked: TypeAlias = Mapping[int, Wait]
"""By job number."""


class Reservation(NamedTuple):
    """Row of the job in the snapshot, and when its room is expected to be free."""

    job: int
    start_s: float
    beside_milli: int
    """What is free beside it then."""
    in_pieces: bool
    """The room is there already, but not where its workers could use it."""


def made(view: Snapshot, wish: IntArray, blocked: Blocked, reserve_after_s: float) -> Reservation | None:
    """The reservation that holds now, if anybody has waited long enough and its policy still wants it to run. `wish`:
    the workers that the policy would give if nobody were pinned."""
    wanted = (view.workers == 0) & (wish > 0)
    late = [
        (-int(view.priority[j]), blocked[number].since_s, number, j)
        for j, number in zip(np.flatnonzero(wanted).tolist(), view.job[wanted].tolist(), strict=True)
        if number in blocked and view.now_s - blocked[number].since_s >= reserve_after_s
    ]
    if not late:
        return None
    *_, number, j = min(late)
    return _for(view, j, wish, blocked[number].no_place)


def held_back(view: Snapshot, reserved: Reservation | None, starts: int | None = None) -> BoolArray:
    """The waiting jobs that may not start before the one with the reservation. `starts`: one that does, whatever
    becomes of the others."""
    held = np.zeros(len(view), np.bool_)
    if reserved is None or view.fragile is None:
        return held
    job = reserved.job
    held |= (view.workers == 0) & view.fragile & (view.priority <= view.priority[job]) & ~view.is_service
    held[job] = False
    beside = reserved.beside_milli
    ends_s = view.now_s + view.start_s + _left_s(view, view.asked)
    order: list[int] = np.flatnonzero(held).tolist()
    if starts is not None and held[starts]:
        order = [starts, *(j for j in order if j != starts)]
    for j in order:
        need = int(view.need[j])
        if np.isfinite(view.remaining[j]) and ends_s[j] <= reserved.start_s:
            held[j] = False
        elif need <= beside:
            held[j], beside = False, beside - need
    if starts is not None:
        held[starts] = False
    return held


def remembered(
    view: Snapshot, workers: IntArray, blocked: Blocked, waits: BoolArray, no_place: BoolArray
) -> dict[int, Wait]:
    """Who is blocked after a decision that gives these workers and keeps some waiting. Whoever runs is not any more."""
    if not blocked and not waits.any():
        return {}
    still = [number for number in view.job[workers == 0].tolist() if number in blocked]
    found = {number: Wait(blocked[number].since_s) for number in still}
    for j in np.flatnonzero(waits).tolist():
        number = int(view.job[j])
        since_s = found[number].since_s if number in found else view.now_s
        found[number] = Wait(since_s, bool(no_place[j]))
    return found


def _for(view: Snapshot, job: int, wish: IntArray, in_pieces: bool) -> Reservation:
    """When enough of the fragile jobs that run have ended, by what is expected of them. If the room is there but in
    pieces, nothing fits beside it: nobody knows where it will come together. Nor does what its policy has in mind for
    jobs that keep their progress."""
    need = int(view.min_workers[job] * view.width[job] + view.fixed_milli[job])
    fragile = view.fragile if view.fragile is not None else np.zeros(len(view), np.bool_)
    stays = (view.workers > 0) & (view.pinned | fragile)
    holds = view.workers * view.width + view.fixed_milli
    free = view.total_milli - int(holds[stays].sum())
    left_s = _left_s(view, view.workers)
    ending = sorted(np.flatnonzero(stays).tolist(), key=lambda j: (float(left_s[j]), j))
    if in_pieces:
        return Reservation(job, view.now_s + float(left_s[ending[0]]) if ending else view.now_s, 0, True)
    at_s = view.now_s
    for j in ending:
        if free >= need:
            break
        free += int(holds[j])
        at_s = view.now_s + float(left_s[j])
    others = (wish > 0) & ~stays & ~fragile
    others[job] = False
    taken = int((wish * view.width + view.fixed_milli)[others].sum())
    return Reservation(job, at_s, max(0, free - need - taken), False)


def _left_s(view: Snapshot, workers: IntArray) -> FloatArray:
    """Seconds to the end on that many workers, as expected."""
    speed = view.rate(workers) if len(view.pools) == 1 else _own_rate(view, workers)
    left: FloatArray = np.divide(expected_steps(view), speed, out=np.full(len(view), np.inf), where=speed > 0)
    return left


def _own_rate(view: Snapshot, workers: IntArray) -> FloatArray:
    top = view.rates.shape[2] - 1
    rate: FloatArray = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(workers, top)]
    return rate
