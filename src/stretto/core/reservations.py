"""Nobody starves behind jobs that may not be stopped: whoever is late gets a reservation.

A wide job could wait for ever behind small ones that keep coming, because each of them, once it runs, is pinned. So
the cycle remembers since when each job was kept from starting by jobs that may not be stopped (`Blocked`): its policy
wanted it, or there was no room for it whatever its policy wanted (`crowded_out`). After `reserve_after_s` the first of
them, by priority and then by that time, has a *reservation*, and is promised a start:
when enough of the jobs that run and may not be stopped have ended, by what is expected of them. Until then jobs that
may not be stopped either, once they run, start before it only if they are more urgent, are expected to end before the
promised start, or fit beside it; after it, only if they are more urgent or have a reservation that comes first. Others
may start, if they are known to keep their progress: they give way when their room is needed.

The promise is kept (`Wait`) until the job starts, also where its policy comes to prefer others meanwhile, and is never
put off. A length is a hint: it never kills, and a job that outlives it counts as long again, so without the promise
jobs that say too little of their length would pass one after the other.

The bound: a job with a reservation starts when those jobs have ended, at the latest, that run at its promised start
and may not be stopped, whatever they said of their length; jobs that are more urgent and reservations before its own
come on top. It is a bound on what pinned jobs do to others. Whom a policy passes over though there is room for it, it
may; then the time begins anew. A promise ends with the last place that its job could have, and nobody waits for a job
that has none; since when it waits is remembered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from stretto.core import services
from stretto.core.decision import Decision
from stretto.core.estimate.remaining import expected_steps
from stretto.core.snapshot import LOST_STARTS, BoolArray, FloatArray, IntArray, Snapshot

_WATCHED = 100
"""Jobs without room, and not wanted by their policy, whose waits are remembered at a time; most of a long queue comes
after them anyway."""

_SETTLES_S = 60.0
"""So long, and two starts, a job that a reservation has started is not stopped for want of work to lose: the first
start of a job may take longer than anybody knows."""


class Wait(msgspec.Struct, frozen=True):
    """A job that pinned ones keep from starting, or that its reservation has just started though its policy would
    not."""

    since_s: float
    no_place: bool = False
    """There was room enough for it last time, but in pieces."""
    promised_s: float = math.inf
    """The start that its reservation promises; inf: it has had none yet."""
    pool: str | int = 0
    """Where that is: the pool's name, as its place in `Snapshot.pools` changes with the nodes that are up. A number
    says nothing: it is there before a promise, and in states of earlier versions."""
    wished: bool = True
    """Its policy would have started it, or it was promised a start that was lost with its place. Otherwise it is only
    watched while there is no room for it at all."""

    @property
    def is_promised(self) -> bool:
        return self.promised_s < math.inf


Blocked: TypeAlias = Mapping[int, Wait]
"""By job number."""


class Reservation(NamedTuple):
    """Row of the job in the snapshot, and when its room is expected to be free, in which pool."""

    job: int
    start_s: float
    pool: int
    beside_milli: int
    """What is free beside it then."""
    in_pieces: bool
    """The room is there already, but not where its workers could use it."""
    expected_s: float
    """When it is expected to start, as things are now; inf: nobody knows."""
    until: int = -1
    """Row of the job whose end makes the room; -1: it is there."""
    overdue: int | None = None
    """Row of the next job after it whose promised start is over."""


class Held(NamedTuple):
    """The waiting jobs that may not start before the one with the reservation."""

    now: BoolArray
    strays: BoolArray
    """Those who are to run in another pool: they may, if they do not come into this one."""
    pool: int = -1

    def with_strays(self) -> Held:
        return Held(self.now | self.strays, np.zeros_like(self.strays), self.pool)


def made(
    view: Snapshot,
    first: Decision,
    blocked: Blocked,
    reserve_after_s: float,
    crowded: BoolArray,
    pools_of: Callable[[int], Sequence[int]],
) -> Reservation | None:
    """The reservation that holds now: of a job that was promised one, or has waited long enough and is wanted by its
    policy or still finds no room at all. `first`: what the policy would do if nobody were pinned; `pools_of`: where
    a job could run if it were alone. Nobody waits for a job that could not."""
    late = []
    for j, wait in _rows(view, blocked):
        if view.workers[j] or (first.rejected is not None and first.rejected[j]):
            continue
        is_late = view.now_s - wait.since_s >= reserve_after_s
        is_kept = first.workers[j] > 0 or (crowded[j] and first.nodes is None)
        if (is_late and is_kept) or (wait.is_promised and not view.is_service[j]):
            late.append((-int(view.priority[j]), wait.since_s, j, wait))
    late.sort(key=lambda one: one[:3])
    for i, (*_, job, wait) in enumerate(late):
        if pools := pools_of(job):
            overdue = (j for *_, j, other in late[i + 1 :] if other.promised_s < view.now_s and pools_of(j))
            return _for(view, job, first, wait, pools)._replace(overdue=next(overdue, None))
    return None


def crowded_out(view: Snapshot) -> BoolArray:
    """Who waits and has no room, not even with everybody gone who may be stopped: no policy could start it. Who would
    have none on an empty cluster either, beside its services, is not among them."""
    waits: BoolArray = (view.workers == 0) & ~view.is_service
    if view.lost_s is None or not waits.any():
        return np.zeros(len(view), np.bool_)
    serves = (view.workers > 0) & view.is_service
    kept = np.where(stays(view) | serves, _held_workers(view), 0)
    crowded: BoolArray = waits & room_beside_services(view).any(axis=0) & ~_room_beside(view, kept).any(axis=0)
    return crowded


def room_beside_services(view: Snapshot) -> BoolArray:
    """[pool, job] where there would be room for its minimum if nobody else ran."""
    return _room_beside(view, np.where(view.is_service, view.workers, 0))


def _room_beside(view: Snapshot, workers: IntArray) -> BoolArray:
    """[pool, job] where a job can run and has room for its minimum beside these workers of those that run."""
    need = view.min_workers * view.width + view.fixed_milli
    free = view.capacity - view.used_milli(workers, np.maximum(view.pool, 0))
    room: BoolArray = runs_in(view) & (need <= free[:, None])
    return room


def without_lost(view: Snapshot, blocked: Blocked, pools_of: Callable[[int], Sequence[int]]) -> Blocked:
    """They, without promises to jobs that could not run any more if they were alone, because nodes were lost or are
    closed to them. Since when they wait is kept, for when there is a place again."""
    lost = {
        int(view.job[j]): msgspec.structs.replace(wait, promised_s=math.inf, pool=0, wished=True)
        for j, wait in _rows(view, blocked)
        if wait.is_promised and not view.workers[j] and not pools_of(j)
    }
    return {**blocked, **lost} if lost else blocked


def stays(view: Snapshot) -> BoolArray:
    """Who runs and may have to be waited for."""
    runs: BoolArray = (view.workers > 0) & (view.pinned | may_stay(view))
    return runs


def with_promise(view: Snapshot, blocked: Blocked, reserved: Reservation) -> Blocked:
    """They, and what this reservation promises."""
    number = int(view.job[reserved.job])
    wait = msgspec.structs.replace(blocked[number], promised_s=reserved.start_s, pool=view.pools[reserved.pool])
    return {**blocked, number: wait}


def held_back(view: Snapshot, first: Decision, reserved: Reservation | None, starts: int | None = None) -> Held:
    """`starts`: a job that does, whatever becomes of the others."""
    nobody = np.zeros(len(view), np.bool_)
    if reserved is None:
        return Held(nobody, nobody)
    new = (view.workers == 0) & may_stay(view) & ~view.is_service
    new[reserved.job] = False
    held = new & (view.priority <= view.priority[reserved.job]) & _could_be_in_the_way(view, reserved.job)
    strays = held & _elsewhere(view, first, reserved.pool)
    held &= ~strays
    if reserved.start_s >= view.now_s:
        _let_pass(view, reserved, held, starts)
    if reserved.overdue is not None:
        new[reserved.overdue] = False
        later = (view.priority <= view.priority[reserved.overdue]) & _could_be_in_the_way(view, reserved.overdue)
        held |= new & ~strays & later
    if starts is not None:
        held[starts] = strays[starts] = False
    return Held(held, strays, reserved.pool)


def _could_be_in_the_way(view: Snapshot, job: int) -> BoolArray:
    """Who may get a node that this job may get."""
    if view.reach is None:
        return np.ones(len(view), np.bool_)
    could: BoolArray = (view.reach & view.reach[job]).any(axis=1)
    return could


def may_stay(view: Snapshot) -> BoolArray:
    """Who, once it runs, may have to be waited for: it is not known to keep its progress, or not preemptible."""
    found = np.zeros(len(view), np.bool_)
    for column in (view.fragile, view.unproven):
        if column is not None:
            found |= column
    return found if view.preemptible is None else found | ~view.preemptible


def guarded(view: Snapshot) -> BoolArray:
    """Who runs, keeps its progress, and yet is not preemptible: it is left its minimum."""
    if view.preemptible is None:
        return np.zeros(len(view), np.bool_)
    fragile = np.zeros(len(view), np.bool_) if view.fragile is None else view.fragile
    found: BoolArray = (view.workers > 0) & ~view.preemptible & ~fragile & ~view.pinned & ~view.is_service
    return found


def remembered(
    view: Snapshot,
    workers: IntArray,
    blocked: Blocked,
    waits: BoolArray,
    no_place: BoolArray,
    unwished: BoolArray,
    crowded: BoolArray,
) -> dict[int, Wait]:
    """Who is blocked after a decision that gives these workers and keeps some waiting: those whom the policy wanted
    (`waits`), and those for whom there was no room whatever it wanted (`crowded`), until there is. Whoever runs is not
    any more; but who was started though its policy would not (`unwished`) is remembered while it settles."""
    if not blocked and not (waits | crowded).any():
        return {}
    settles = _settles(view) | ((view.workers == 0) & unwished & may_stay(view))
    found: dict[int, Wait] = {}
    for j, wait in _rows(view, blocked):
        wished = wait.wished or bool(waits[j])
        waits_on = not view.workers[j] and not workers[j] and (wished or wait.is_promised or crowded[j])
        if waits_on or (settles[j] and wait.is_promised):
            found[int(view.job[j])] = msgspec.structs.replace(wait, no_place=bool(no_place[j]), wished=wished)
    for j in np.flatnonzero(waits).tolist():
        found.setdefault(int(view.job[j]), Wait(view.now_s, bool(no_place[j])))
    room = _WATCHED - sum(not wait.wished for wait in found.values())
    for j in _widest(view, crowded & (workers == 0) & ~np.isin(view.job, list(found)), room):
        found[int(view.job[j])] = Wait(view.now_s, wished=False)
    return found


def settling(view: Snapshot, blocked: Blocked) -> BoolArray:
    """Whom a reservation has just started, and its policy would stop before it has work to lose."""
    return _settles(view) & np.isin(view.job, np.array(list(blocked), np.int64))


def _settles(view: Snapshot) -> BoolArray:
    """Who runs and may be pinned soon, when its processes are there. Some never are, as they save so often: these may
    be stopped after a while like others. Who is left its minimum anyway may have another size at once."""
    until_s = view.changed_s + LOST_STARTS * view.start_s + _SETTLES_S
    settles: BoolArray = (view.workers > 0) & may_stay(view) & ~view.pinned & ~guarded(view) & (view.now_s <= until_s)
    return settles


def _widest(view: Snapshot, some: BoolArray, most: int) -> list[int]:
    """The most urgent of them, then those that need most: the others find room sooner."""
    rows = np.flatnonzero(some) if most > 0 else np.empty(0, np.int64)
    need = (view.min_workers * view.width + view.fixed_milli)[rows]
    widest: list[int] = rows[np.lexsort((rows, -need, -view.priority[rows]))][:most].tolist()
    return widest


def still_waiting(view: Snapshot, blocked: Blocked) -> dict[int, Wait]:
    """Without what is over: jobs that run by now, or are not there any more."""
    return {int(view.job[j]): wait for j, wait in _rows(view, blocked) if not view.workers[j]}


def _rows(view: Snapshot, blocked: Blocked) -> Iterator[tuple[int, Wait]]:
    """Those that are in the snapshot, by row."""
    if blocked:
        for j in np.flatnonzero(np.isin(view.job, np.array(list(blocked), np.int64))).tolist():
            yield j, blocked[int(view.job[j])]


def _for(view: Snapshot, job: int, first: Decision, wait: Wait, pools: Sequence[int]) -> Reservation:
    """Of the pools that have places for it the one that was promised, or that its policy chose; otherwise where it is
    soonest."""
    chosen = [pool for pool in pools if wait.is_promised and view.pools[pool] == wait.pool]
    if not chosen and first.workers[job]:
        chosen = [pool for pool in pools if pool == first.pool[job]]
    return min((_in(view, job, first, wait, pool) for pool in chosen or pools), key=lambda one: one.start_s)


def _in(view: Snapshot, job: int, first: Decision, wait: Wait, pool: int) -> Reservation:
    """When enough of the jobs that run in the pool and may stay have ended, by what is expected of them; no later than
    was promised. If the room is there but in pieces, nothing fits beside it: nobody knows where it will come
    together. Nor does what its policy has in mind for jobs that keep their progress."""
    need = int(view.min_workers[job] * view.width[job] + view.fixed_milli[job])
    stay = stays(view) & (view.pool == pool)
    holds = _held_workers(view) * view.width + view.fixed_milli
    free = int(view.capacity[pool]) - int(holds[stay].sum())
    left_s = _left_s(view, view.workers, stay)
    ending = sorted(np.flatnonzero(stay).tolist(), key=lambda j: (float(left_s[j]), j))
    if wait.no_place:
        until = ending[0] if ending else -1
        at_s = view.now_s + float(left_s[until]) if ending else view.now_s
        return Reservation(job, min(at_s, wait.promised_s), pool, 0, True, at_s, until)
    at_s, until = view.now_s, -1
    for j in ending:
        if free >= need:
            break
        free += int(holds[j])
        at_s, until = view.now_s + float(left_s[j]), j
    others = (first.workers > 0) & (first.pool == pool) & ~stay & ~may_stay(view)
    others[job] = False
    taken = int((first.workers * view.width + view.fixed_milli)[others].sum())
    beside = max(0, free - need - taken)
    return Reservation(job, min(at_s, wait.promised_s), pool, beside, False, at_s, until)


def _held_workers(view: Snapshot) -> IntArray:
    """The workers that nobody takes from those who stay."""
    held: IntArray = np.where(guarded(view), view.min_workers, view.workers)
    return held


def runs_in(view: Snapshot) -> BoolArray:
    """[pool, job] who can run where at all."""
    runs: BoolArray = (view.rates.max(axis=2) > 0)[:, view.curve]
    return runs


def _elsewhere(view: Snapshot, first: Decision, pool: int) -> BoolArray:
    """Whom the policy would start in another pool, or who cannot run in this one."""
    if len(view.pools) == 1:
        return np.zeros(len(view), np.bool_)
    other: BoolArray = ((first.workers > 0) & (first.pool != pool)) | ~runs_in(view)[pool]
    return other


def _let_pass(view: Snapshot, reserved: Reservation, held: BoolArray, starts: int | None) -> None:
    """Those who are expected to end before the reservation, or fit beside it, are not held back."""
    known = held & np.isfinite(view.remaining)
    held[known] = (view.now_s + view.start_s + _left_s(view, view.asked, known))[known] > reserved.start_s
    beside, need = reserved.beside_milli, view.need
    small = np.flatnonzero(held & (need <= beside))
    for j in sorted(small.tolist(), key=lambda j: j != starts):
        if need[j] <= beside:
            held[j], beside = False, beside - int(need[j])


def _left_s(view: Snapshot, workers: IntArray, some: BoolArray) -> FloatArray:
    """Seconds to the end of some jobs on that many workers, as expected; inf of all others, as most of a long queue is
    of no concern."""
    few = services.only(view, some)
    speed = few.rate(workers[some]) if len(view.pools) == 1 else _own_rate(few, workers[some])
    left_s = np.full(len(view), np.inf)
    left_s[some] = np.divide(expected_steps(few), speed, out=np.full(len(few), np.inf), where=speed > 0)
    return left_s


def _own_rate(view: Snapshot, workers: IntArray) -> FloatArray:
    top = view.rates.shape[2] - 1
    rate: FloatArray = view.rates[np.maximum(view.pool, 0), view.curve, np.minimum(workers, top)]
    return rate
