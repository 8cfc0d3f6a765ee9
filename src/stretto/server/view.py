"""The book as a snapshot: what a policy may look at, made of targets.

A job that something holds back before any policy is asked (dependencies, a quota, a back-off, its own wish) is not in
it; `held` says why.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from stretto.backends.protocol import Node
from stretto.core.cores import CPU_POOL
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU, FloatArray, IntArray, Nodes, Snapshot
from stretto.errors import UsageError
from stretto.jobs.model import Job, Seat
from stretto.server import lengths, loss
from stretto.server.book import Active
from stretto.server.estimates import Estimates, Shape
from stretto.server.lengths import Prospect


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may have at a time; None: no limit."""

    devices: float | None = None
    jobs: int | None = None

    def __post_init__(self) -> None:
        if self.devices is not None and not 0 <= self.devices < math.inf:
            raise UsageError(f"a quota of {self.devices:g} devices cannot be", hint="give a number from 0 on")
        if self.jobs is not None and self.jobs < 0:
            raise UsageError(f"a quota of {self.jobs} jobs cannot be", hint="give a number from 0 on")


class Hold(msgspec.Struct, frozen=True):
    """Why a job is not even considered: a stable name, and the sentence."""

    name: str
    text: str
    until_s: float = math.inf
    """When that changes by itself."""


class Cluster(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    drained: Mapping[str, float] = {}
    """Nodes that are to be left, and until when those may stay there who would lose their work."""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.pool for node in self.nodes)) or ("cpu",)

    def columns(self) -> Nodes:
        pools = self.pools
        rows = [
            (pools.index(node.pool), node.devices, node.cpu_milli, node.memory_mib, node.gpu_memory_mib)
            for node in self.nodes
        ]
        columns = np.array(rows, np.int64).reshape(-1, 5)
        return Nodes(
            name=tuple(node.name for node in self.nodes),
            pool=columns[:, 0],
            devices=columns[:, 1],
            cpu_milli=columns[:, 2],
            memory_mib=columns[:, 3],
            gpu_memory_mib=columns[:, 4],
        )


class Landscape(Protocol):
    """The nodes, as a snapshot shows them."""

    @property
    def pools(self) -> tuple[str, ...]: ...

    @property
    def drained(self) -> Mapping[str, float]:
        """Nodes that are to be left, and until when those may stay there who would lose their work."""

    def columns(self) -> Nodes: ...


def snapshot(
    jobs: Sequence[Active],
    cluster: Landscape,
    estimates: Estimates,
    now_s: float,
    most: Mapping[int, int],
    staying: Container[int] = (),
) -> Snapshot:
    """All these jobs, in order of number. `most` lowers the maximum of some (quotas); `staying` are those that are not
    moved now though they were asked to."""
    nodes, pools = cluster.columns(), cluster.pools
    rows = _rows(jobs, estimates, most, _smallest(nodes))
    table = np.frombuffer(b"".join([row.packed for row in rows]), np.float64).reshape(len(rows), len(_COLUMNS))
    columns: dict[str, Any] = {name: table[:, i] for i, name in enumerate(_COLUMNS)}
    columns |= {name: columns[name].astype(np.int64) for name in _WHOLE}
    _count_up(columns, now_s)
    rates, curve = estimates.table(_shown_sizes(rows, columns, nodes), pools)
    _suppose_progress(columns, rates, curve)
    totals = estimates.lengths.totals([row.prospect for row in rows])
    lengths.tell(columns, totals, rates, curve, lambda j: estimates.timed(rows[j].shape))
    demand = np.column_stack([columns.pop(name) for name in _DEMAND])
    columns["width"] = _in_slots(columns["width"], demand, nodes, pools)
    step, is_service = columns.pop("step"), columns.pop("is_service").astype(np.bool_)
    moving = {active.number: active.job.node for active in jobs if active.job.node and active.number not in staying}
    placed = _placed(jobs, nodes, most, moving)
    columns |= _stops(columns, placed, moving, now_s)
    capacity = np.bincount(nodes.pool, nodes.devices * GPU, len(pools)).astype(np.int64)
    found = Snapshot(
        now_s=now_s,
        pools=pools,
        capacity=capacity,
        nodes=nodes,
        rates=rates,
        falls=bool((np.diff(rates, axis=2) < 0).any()),
        history=estimates.history(),
        curve=curve,
        demand=demand,
        is_service=is_service,
        placed=placed,
        step=step if (step != 1).any() else None,
        **_exploring(jobs, pools, estimates, columns),
        **columns,
    )
    return _draining(found, cluster.drained) if cluster.drained else found


def _shown_sizes(rows: Sequence[Row], columns: dict[str, Any], nodes: Nodes) -> list[Shape]:
    """Lower the maximums that this cluster could never hold, and with them the curves, whose length they are: what is
    decided costs more than their square, and anybody may ask for any size. One more than could be held is left, so that
    nobody is said to have all that it could use who would take more."""
    slots, width = int(nodes.devices.sum()), columns["width"]
    cores = int(nodes.cpu_milli.sum()) // np.where(columns["cpu_milli"] > 0, columns["cpu_milli"], GPU)
    held = np.where(width > 0, slots * GPU // np.maximum(width, 1), np.maximum(cores, slots))
    most = np.maximum(np.maximum(held, columns["workers"]) + 1, np.maximum(columns["min_workers"], _ALWAYS_SHOWN))
    columns["max_workers"] = np.minimum(columns["max_workers"], most)
    columns["requested"] = np.minimum(columns["requested"], most)
    return [
        row.shape if row.shape.high <= high else row.shape._replace(high=high)
        for row, high in zip(rows, most.tolist(), strict=True)
    ]


def _in_slots(width: IntArray, demand: IntArray, nodes: Nodes, pools: tuple[str, ...]) -> IntArray:
    """Where there are no GPUs whoever asks for cores takes the slots that they are; each at least one."""
    if set(pools) != {CPU_POOL} or not len(nodes.name):
        return width
    slot_milli = max(1, int((nodes.cpu_milli // np.maximum(nodes.devices, 1)).max()))
    slots = np.maximum(-(-demand[:, 0] // slot_milli), 1) * GPU
    return np.where((width == 0) & (demand[:, 2] == 0), slots, width)


def _exploring(
    jobs: Sequence[Active], pools: tuple[str, ...], estimates: Estimates, columns: dict[str, Any]
) -> dict[str, Any]:
    """Who is tried at other sizes, what was measured of them, and where they start."""
    explores = columns.pop("explores").astype(np.bool_)
    guess, measured, known = columns["min_workers"].copy(), {}, dict[str, int]()
    for j in np.flatnonzero(explores).tolist():
        active = jobs[j]
        own = estimates.measured(active.number)
        # Whoever waits is thought of as it was last seen, wherever that was.
        there = pools[active.pool : active.pool + 1] if active.pool >= 0 else pools
        curve = next((own[pool] for pool in there if pool in own), None)
        if curve is not None:
            measured[active.number] = curve
            continue
        klass = active.request.klass
        if klass not in known:
            known[klass] = estimates.best_size(klass)
        guess[j] = min(max(known[klass], guess[j]), columns["max_workers"][j])
    return {"explores": explores, "measured": measured, "guess": guess}


_DEMAND = "cpu_milli", "memory_mib", "gpu_memory_mib"
_WHOLE = (
    "job", "klass", "priority", "requested", "min_workers", "max_workers", "step", "fixed_milli", "workers", "pool",
    "wanted", "restarts", "width", *_DEMAND,
)  # fmt: skip
_COLUMNS = (
    *_WHOLE, "submit_s", "deadline_s", "resize_s", "start_s", "remaining", "remaining_sd", "done", "ran_s", "gpu_s",
    "waited_s", "started_s", "changed_s", "begun_s", "is_service", "explores", "runs", "held", "waits",
    "since_s", "fragile", "unproven", "preemptible",
)  # fmt: skip
_PACK = struct.Struct(f"{len(_COLUMNS)}d").pack

_LONGEST_LAUNCH_S = 60.0
_ALWAYS_SHOWN = 64
"""Up to this a size is shown on the smallest cluster, too: what is expected of jobs may be said for it."""

_COSTS_S = {"elastic": (0.2, 0.5), "restart": (10.0, 5.0), "rigid": (1e9, 1.0), "service": (1.0, 2.0)}
"""What a resize and a start cost a job of each level, until it was measured."""


class Row(NamedTuple):
    """A job's part of a snapshot, but for what time does to it; kept until one of the things it is made of changes.
    A long queue is mostly rows that do not."""

    untouched: Job | None
    """The job, if it never ran and nothing holds it back: then only an event, which replaces it, changes anything."""
    made_of: tuple[Any, ...]
    packed: bytes
    """By `_COLUMNS`."""
    shape: Shape
    prospect: Prospect
    """How long it may be, if its workers have not said so."""


def _rows(jobs: Sequence[Active], estimates: Estimates, most: Mapping[int, int], smallest: int) -> list[Row]:
    if most:
        return [_row(active, most.get(active.number), estimates, smallest) for active in jobs]
    return [
        row
        if (row := active.row) is not None and row.untouched is active.job and not active.target
        else _row(active, None, estimates, smallest)
        for active in jobs
    ]


def _row(active: Active, most: int | None, estimates: Estimates, smallest: int) -> Row:
    job, progress = active.job, active.progress
    made_of = (
        job, active.target, active.pool, active.wanted, progress.steps, progress.total, progress.paused_s, most,
        estimates, smallest, active.saved_s,
    )  # fmt: skip
    row: Row | None = active.row
    if row is None or row.made_of != made_of:
        moved = active.target or job.workers or job.starts or active.request.is_service
        held = job.wish != "run" or job.not_before_s or active.file.after or most is not None
        packed = _PACK(*_values(active, most, estimates, smallest))
        untouched = None if moved or held else job
        row = active.row = Row(untouched, made_of, packed, _shape(active), estimates.lengths.of(active.request))
    return row


def kept(active: Active, most: int | None) -> tuple[Seat, ...]:
    """The seats that it may keep: none if it has fewer than it may have by now, not all if it has more."""
    seats, asked = active.target, active.request
    high = asked.max_workers if most is None else min(asked.max_workers, most)
    if asked.min_workers <= len(seats) <= high and asked.step == 1:
        return seats
    high = min(len(seats), high)
    if high < asked.min_workers:
        return ()
    return seats[: msgspec.structs.replace(asked, max_workers=high).sizes()[-1]]


def _values(active: Active, most: int | None, estimates: Estimates, smallest: int) -> tuple[float, ...]:
    job, asked, progress = active.job, active.request, active.progress
    high = asked.max_workers if most is None else min(asked.max_workers, most)
    left = math.nan if progress.total is None else max(0.0, float(progress.total - progress.steps))
    resize_s, start_s = _COSTS_S[job.level]
    if progress.paused_s and job.resizes:
        resize_s = progress.paused_s / job.resizes
    start_s = loss.start_s(job, start_s)
    held, seats = len(job.workers), len(kept(active, most))
    return (
        job.number, estimates.klass(asked.klass), asked.priority, min(asked.requested, high), asked.min_workers, high,
        asked.step, asked.fixed_milli, seats, active.pool if seats else -1, active.wanted,
        job.starts + job.resizes, asked.share_milli(smallest), *asked.demand,
        job.submitted_s, job.submitted_s + asked.deadline_s, resize_s, start_s, left, 0.0, progress.steps,
        job.ran_s, job.device_s, job.waited_s, math.nan if job.started_s is None else job.started_s, job.changed_s,
        max((worker.began_s if worker.pid else math.inf for worker in job.workers), default=0.0),
        asked.is_service, _explores(asked), held > 0, held * job.width_milli / GPU, job.phase == "queued",
        loss.since_s(active), loss.fragile(job), loss.unproven(job), asked.preemptible,
    )  # fmt: skip


def _explores(asked: JobRequest) -> bool:
    return asked.explore and asked.level == "elastic" and asked.min_workers < asked.max_workers


def _smallest(nodes: Nodes) -> int:
    """Memory of the smallest device: by it are counted those who asked for memory alone."""
    return int(min((mib for mib in nodes.gpu_memory_mib.tolist() if mib), default=0))


def _count_up(columns: dict[str, Any], now_s: float) -> None:
    """Times since a job's last change belong to it as well."""
    span_s = np.maximum(0.0, now_s - columns["changed_s"])
    for name, rate in (("ran_s", "runs"), ("gpu_s", "held"), ("waited_s", "waits")):
        columns[name] = columns[name] + span_s * columns.pop(rate)
    # Workers that are being launched are not there yet, unless that takes so long that they may never be.
    begun_s = columns.pop("begun_s")
    begun_s = np.where(np.isinf(begun_s), np.where(span_s < _LONGEST_LAUNCH_S, now_s, 0.0), begun_s)
    columns["changed_s"] = np.maximum(columns["changed_s"], begun_s)


def _stops(columns: dict[str, Any], placed: IntArray, moving: Collection[int], now_s: float) -> dict[str, Any]:
    """What a stop would do to each; no columns where nobody loses anything and everybody may be stopped. Whoever is on
    a node that has gone has lost it already, and whoever moves gives it up."""
    since_s, fragile, unproven, preemptible = (
        columns.pop(name) for name in ("since_s", "fragile", "unproven", "preemptible")
    )
    if not fragile.any() and np.isinf(since_s).all() and preemptible.all():
        return {}
    keeps = (placed.sum(axis=1) >= columns["workers"]) & ~np.isin(columns["job"], list(moving))
    return {
        "lost_s": np.where(keeps, np.maximum(0.0, now_s - since_s), 0.0),
        "fragile": fragile.astype(np.bool_),
        "unproven": unproven.astype(np.bool_),
        "preemptible": preemptible.astype(np.bool_),
    }


def _draining(found: Snapshot, drained: Mapping[str, float]) -> Snapshot:
    """A node that is drained keeps what its pinned jobs hold of it, as long as they may stay, and nothing else: nobody
    new comes, and everybody else counts as not being there."""
    at = {name: i for i, name in enumerate(found.nodes.name)}
    left = np.zeros(len(at), np.bool_)
    over = np.zeros(len(at), np.bool_)
    for name, until_s in drained.items():
        if name in at:
            left[at[name]], over[at[name]] = True, until_s <= found.now_s
    if found.lost_s is not None and over.any():
        leaves = found.placed[:, over].any(axis=1)
        found = msgspec.structs.replace(found, lost_s=np.where(leaves, 0.0, found.lost_s))
    there_now = found.placed[:, left].any(axis=1)
    stays = found.pinned & there_now
    placed = np.where(left & ~stays[:, None], 0, found.placed)
    # Nobody gains by stopping those who stay; those who must go have no minimum to keep there.
    preemptible = None if found.preemptible is None else (found.preemptible | there_now) & ~stays
    there = np.where(left, placed, 0)
    width, (cpu, mib) = found.width, found.demand[:, :2].T
    used = there.T @ width
    nodes = found.nodes
    return msgspec.structs.replace(
        found,
        placed=placed,
        reach=np.broadcast_to(~left, placed.shape).copy(),
        preemptible=preemptible,
        capacity=np.bincount(nodes.pool, np.where(left, used, nodes.devices * GPU), len(found.pools)).astype(np.int64),
        nodes=msgspec.structs.replace(
            nodes,
            devices=np.where(left & ~there.any(axis=0), 0, nodes.devices),
            cpu_milli=np.where(left, there.T @ np.where((width == 0) & (cpu == 0), GPU, cpu), nodes.cpu_milli),
            memory_mib=np.where(left, there.T @ mib, nodes.memory_mib),
        ),
    )


def _suppose_progress(columns: dict[str, Any], rates: FloatArray, curve: IntArray) -> None:
    """Jobs that say nothing of their progress have done what their time is worth, counted as lengths are when they end
    (`Estimates.ended`). Otherwise they would be taken for new as long as they run."""
    silent = np.flatnonzero((columns["done"] <= 0) & np.isnan(columns["remaining"]) & (columns["ran_s"] > 0))
    if not len(silent):
        return
    low, pool = columns["min_workers"][silent], np.maximum(columns["pool"][silent], 0)
    came_s = lengths.worker_s(columns, silent) / np.maximum(low, 1)
    done = columns["done"].copy()
    done[silent] = came_s * rates[pool, curve[silent], np.minimum(low, rates.shape[2] - 1)]
    columns["done"] = done


def _shape(active: Active) -> Shape:
    asked = active.request
    dear = asked.level == "restart"
    return Shape(active.number, asked.klass, asked.min_workers, asked.max_workers, asked.pools, dear)


def _placed(jobs: Sequence[Active], nodes: Nodes, most: Mapping[int, int], moving: Mapping[int, str]) -> IntArray:
    """[job, node] targets. A job that moves counts as if it were there: placements keep what is placed."""
    at = {name: i for i, name in enumerate(nodes.name)}
    placed = np.zeros((len(jobs), len(nodes.name)), np.int64)
    for j, active in [(j, active) for j, active in enumerate(jobs) if active.target]:
        for seat in kept(active, most.get(active.number)):
            node = moving.get(active.number, seat.node)
            if node in at:
                placed[j, at[node]] += 1
    return placed


# What is not considered.


def held(
    jobs: Iterable[Active], names: Mapping[str, int], quotas: Mapping[str, Quota], now_s: float
) -> tuple[dict[int, Hold], dict[int, int]]:
    """Who is held back and why, and the maximum of those whose user's quota lowers it."""
    jobs = list(jobs)
    touched = [a for a in jobs if a.row is None or a.row.untouched is not a.job or a.target]
    holds = {a.number: hold for a in touched if (hold := _hold(a, names, now_s)) is not None}
    by_user: dict[str, list[Active]] = defaultdict(list)
    for active in jobs if quotas else ():
        quota = quotas.get(active.job.user, quotas.get("*"))
        if quota is not None and quota.devices is not None and active.number not in holds:
            by_user[active.job.user].append(active)
    most: dict[int, int] = {}
    for user, some in by_user.items():
        quota = quotas.get(user, quotas.get("*"))
        assert quota is not None
        assert quota.devices is not None
        _within(some, quota.devices, holds, most)
    return holds, most


def _hold(active: Active, names: Mapping[str, int], now_s: float) -> Hold | None:
    job = active.job
    if job.wish == "cancel":
        return Hold("cancelled", "is being cancelled")
    if job.wish == "suspend":
        return Hold("suspended", "is suspended; `stretto resume` lets it go on")
    if job.not_before_s > now_s and not job.workers:
        left_s = job.not_before_s - now_s
        return Hold("back-off", f"is tried again in {left_s:.0f} s: {job.message}", job.not_before_s)
    if job.workers or not (after := active.file.after):
        return None
    before = [name for name in after if names.get(name, job.number) != job.number]
    if before:
        return Hold("dependency", f"waits until {', '.join(before)} has ended")
    return None


def _within(jobs: list[Active], devices: float, holds: dict[int, Hold], most: dict[int, int]) -> None:
    """What runs stays, whatever the quota is by now; then minimums in order: who is more urgent, came earlier; then
    growth in the same order."""
    order = sorted(jobs, key=lambda a: (not a.target, -a.request.priority, a.number))
    left = round(devices * GPU)
    inside: list[Active] = []
    for active in order:
        least = _least(active) * active.request.width_milli
        if least > left and not active.target:
            used = devices - left / GPU
            text = f"waits: its user may have {devices:g} devices and its other jobs hold {used:g} of them"
            holds[active.number] = Hold("quota", text)
            continue
        left -= least
        inside.append(active)
    for active in inside:
        asked, least = active.request, _least(active)
        room = max(0, left) // asked.width_milli if asked.width_milli else asked.max_workers
        more = min(asked.max_workers - least, room)
        most[active.number] = least + more
        left -= more * asked.width_milli


def _least(active: Active) -> int:
    """The fewest workers it is left: the minimum, or what it has if another size would cost it work."""
    held, asked = len(active.target), active.request
    stays = held if math.isfinite(loss.since_s(active)) else 0
    return min(max(asked.min_workers, stays), asked.max_workers)
