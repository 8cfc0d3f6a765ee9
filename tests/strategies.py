"""Random worlds for property tests, and short-hands for worlds written by hand.

`snapshots()` draws any snapshot a policy may meet: no jobs, no GPUs, unknown or zero lengths, jobs wider than
the cluster, several workers on one GPU, fixed roles, curves with plateaus and with a smallest useful size.
`traces()` draws small workloads that end. `view_of` and `trace_of` build one by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from stretto.core.snapshot import GPU, History, Nodes, Snapshot
from stretto.sim.trace import Trace

CLASSES = 3
_PLENTY = 2**40


# By hand.


def nodes_of(devices: Sequence[int], pool: Sequence[int] | None = None) -> Nodes:
    """Nodes with so many devices each, and plenty of everything else."""
    n = len(devices)
    return Nodes(
        name=tuple(f"node-{i}" for i in range(n)),
        pool=np.array(pool if pool is not None else [0] * n, np.int64),
        devices=np.array(devices, np.int64),
        cpu_milli=np.full(n, _PLENTY),
        memory_mib=np.full(n, _PLENTY),
        gpu_memory_mib=np.full(n, _PLENTY),
    )


def job(**columns: Any) -> dict[str, Any]:
    """One job for `view_of`: columns of the snapshot by name, and `rate`, its curve from 0 workers on.

    Without a curve it scales linearly at 1 step/s per worker; `size=n` is short for a rigid job of n workers.
    """
    size = columns.pop("size", None)
    if size is not None:
        columns |= {"requested": size, "min_workers": size, "max_workers": size}
    return columns


def view_of(
    gpus: int | Sequence[int], jobs: Sequence[dict[str, Any]], now_s: float = 0.0, history: History | None = None
) -> Snapshot:
    """A snapshot of one pool with these jobs (see `job`), numbered in the order given."""
    nodes = nodes_of([gpus] if isinstance(gpus, int) else gpus)
    n = len(jobs)
    low = [j.get("min_workers", 1) for j in jobs]
    high = [j.get("max_workers", max(1, low[i])) for i, j in enumerate(jobs)]
    widest = max([1, *high, *(len(j["rate"]) - 1 for j in jobs if "rate" in j)])
    rates = np.zeros((1, max(n, 1), widest + 1))
    for i, j in enumerate(jobs):
        curve = j.get("rate", range(widest + 1))
        rates[0, i] = np.pad(np.asarray(curve, float), (0, widest + 1 - len(curve)), mode="edge")
    workers = _column(jobs, "workers", 0, np.int64)
    submit = _column(jobs, "submit_s", 0.0)
    ran = _column(jobs, "ran_s", 0.0)
    columns: dict[str, Any] = {
        "job": np.arange(n),
        "klass": _column(jobs, "klass", 0, np.int64),
        "submit_s": submit,
        "priority": _column(jobs, "priority", 0, np.int64),
        "deadline_s": _column(jobs, "deadline_s", math.inf),
        "requested": np.array([j.get("requested", high[i]) for i, j in enumerate(jobs)], np.int64),
        "min_workers": np.array(low, np.int64),
        "max_workers": np.array(high, np.int64),
        "width": _column(jobs, "width", GPU, np.int64),
        "fixed_milli": _column(jobs, "fixed_milli", 0, np.int64),
        "demand": np.zeros((n, 3), np.int64),
        "curve": np.arange(n),
        "resize_s": _column(jobs, "resize_s", 0.0),
        "start_s": _column(jobs, "start_s", 0.0),
        "is_service": _column(jobs, "is_service", False, np.bool_),
        "wanted": _column(jobs, "wanted", 0, np.int64),
        "workers": workers,
        "pool": np.where(workers > 0, 0, -1),
        "placed": np.zeros((n, 0), np.int64),
        "remaining": _column(jobs, "remaining", 100.0),
        "remaining_sd": _column(jobs, "remaining_sd", 0.0),
        "done": _column(jobs, "done", 0.0),
        "ran_s": ran,
        "gpu_s": _column(jobs, "gpu_s", 0.0),
        "waited_s": np.maximum(0.0, now_s - submit - ran),
        "started_s": np.where(workers > 0, submit, _column(jobs, "started_s", math.nan)),
        "changed_s": np.array([j.get("changed_s", j.get("submit_s", 0.0)) for j in jobs], np.float64),
        "restarts": _column(jobs, "restarts", 0, np.int64),
    }  # fmt: skip
    if any("lost_s" in j for j in jobs):
        columns["lost_s"] = _column(jobs, "lost_s", 0.0)
        columns["fragile"] = np.array([j.get("fragile", "lost_s" in j) for j in jobs], np.bool_)
        columns["preemptible"] = _column(jobs, "preemptible", False, np.bool_)
    return Snapshot(
        now_s=now_s, pools=("gpu",), capacity=np.array([nodes.devices.sum() * GPU], np.int64), nodes=nodes,
        rates=rates, history=history or History(), **columns,
    )  # fmt: skip


def fragile(**columns: Any) -> dict[str, Any]:
    """A job that loses its work when it is stopped: all it did so far, unless `lost_s` says how much."""
    columns.setdefault("lost_s", columns.get("ran_s", 0.0))
    return job(**columns)


def trace_of(jobs: Sequence[dict[str, Any]], name: str = "hand") -> Trace:
    """A workload by hand: submit_s, work, min_workers, max_workers, requested, rate (curve), width, klass."""
    high = [j.get("max_workers", j.get("requested", 1)) for j in jobs]
    widest = max([1, *high, *(len(j["rate"]) - 1 for j in jobs if "rate" in j)])
    rates = np.zeros((1, len(jobs), widest + 1))
    for i, j in enumerate(jobs):
        curve = j.get("rate", range(widest + 1))
        rates[0, i] = np.pad(np.asarray(curve, float), (0, widest + 1 - len(curve)), mode="edge")
    asked = [j.get("requested", high[i]) for i, j in enumerate(jobs)]
    work = [j["work"] for j in jobs]
    return Trace.build(
        name,
        [str(i) for i in range(len(jobs))],
        [j.get("submit_s", 0.0) for j in jobs],
        asked,
        [w / rates[0, i, min(asked[i], widest)] for i, w in enumerate(work)],
        work=work,
        curve=list(range(len(jobs))),
        rates=rates,
        min_workers=[j.get("min_workers", 1) for j in jobs],
        max_workers=high,
        width_milli=[j.get("width", GPU) for j in jobs],
        classes=[j.get("klass", "a") for j in jobs],
    )


def _column(jobs: Sequence[dict[str, Any]], name: str, default: Any, kind: Any = np.float64) -> Any:
    return np.array([j.get(name, default) for j in jobs], kind)


# At random.


def numbers(most: float) -> st.SearchStrategy[float]:
    """Zero, small whole numbers, and anything up to a limit."""
    return st.one_of(st.integers(0, 20).map(float), st.floats(0, most, allow_subnormal=False))


# Strategies are built once: building them anew for every draw would take most of a test's time.
_COIN = st.booleans()
_MANY = numbers(1e6)
_AGE = numbers(1e5)
_FLOOR = st.sampled_from([1, 1, 1, 2, 4])
_GAINS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=12)
_SPEED = st.sampled_from([0.01, 1.0, 30.0])
_LOW = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
_SPREAD = st.integers(0, 12)
_OFFSET = st.integers(-2, 16)
_WIDTH = st.sampled_from([GPU, GPU, GPU, 250, 333, 500, 2 * GPU, 8 * GPU])
_FIXED = st.sampled_from([0, 0, 0, 500, GPU, 3 * GPU])
_RARELY = st.sampled_from([False, False, False, True])
_FACTOR = st.sampled_from([0.25, 1.0, 3.0])
_COST = st.sampled_from([0.0, 0.5, 30.0])
_SHARE = st.sampled_from([0.0, 0.25, 1.0])
_DUE = st.one_of(st.just(math.inf), _MANY)
_SOON = st.one_of(st.just(math.inf), st.integers(0, 600).map(float))
_KLASS = st.integers(0, CLASSES - 1)
_FINISHED = st.lists(st.tuples(_KLASS, _AGE), max_size=8)
_WANTS = st.tuples(st.integers(1, 3), _KLASS, st.integers(0, 2), _COST, _COST)
"""Step to the next job number, class, priority, cost of a resize and of a start."""
_PAST = st.tuples(_SHARE, _SHARE, _SPREAD, _MANY, _COIN, _DUE, st.sampled_from([0.0, 0.5]), _COST, st.integers(1, 4))
"""Share of the age since the last change, share of the rest that it ran, extra workers it had, work left, whether
its length is unknown, time to its deadline, uncertainty, steps/s so far, restarts."""


class Curve(msgspec.Struct, frozen=True):
    """Steps/s from 0 workers on, never falling, positive from `floor` workers on."""

    floor: int
    rates: tuple[float, ...]


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Concave, or with plateaus and jumps; some need several workers to make any progress."""
    floor, gains, concave, first = draw(_FLOOR), draw(_GAINS), draw(_COIN), draw(_SPEED)
    if concave:
        gains.sort(reverse=True)
    rates = np.concatenate((np.zeros(floor), first * np.cumsum([1.0, *gains])))
    return Curve(floor, tuple(rates.tolist()))


class Wish(msgspec.Struct, frozen=True):
    """What a job asks for."""

    curve: int
    low: int
    high: int
    asked: int
    width: int
    fixed: int


@st.composite
def wishes(draw: st.DrawFn, floors: Sequence[int], elastic: bool, fixed: bool = True) -> Wish:
    """Rigid: one size. Elastic: a range, and a requested size that need not lie in it."""
    curve = draw(st.integers(0, len(floors) - 1))
    low = max(draw(_LOW), floors[curve])
    spread = draw(_SPREAD) if elastic else 0
    asked = max(1, low + min(draw(_OFFSET), spread + 4)) if elastic else low
    return Wish(curve, low, low + spread, asked, draw(_WIDTH), draw(_FIXED) if fixed else 0)


@st.composite
def snapshots(
    draw: st.DrawFn,
    *,
    elastic: bool = True,
    known: bool | None = None,
    pools: int = 1,
    services: bool = False,
    placed: bool = False,
    overfull: bool = True,
    max_jobs: int = 12,
) -> Snapshot:
    """Any valid snapshot.

    `known`: every length is (True), none is (False), or some are (None). `pools`: at most so many device types.
    `placed`: workers are on nodes, not only counted. `overfull`: sometimes the running jobs hold more than there
    is, as when services or a lost node took room from them.
    """
    types = draw(st.integers(1, pools))
    nodes = draw(_nodes(types))
    shapes = draw(st.lists(curves(), min_size=1, max_size=4))
    jobs = draw(st.lists(wishes([c.floor for c in shapes], elastic), max_size=max_jobs))
    crowded = overfull and not placed and draw(_RARELY)
    workers, pool, where = _running(draw, jobs, nodes, types, crowded)
    columns = _wanted_columns(draw, jobs, services) | _past_columns(draw, jobs, workers, known)
    now_s = columns.pop("now_s")
    return Snapshot(
        now_s=now_s,
        pools=tuple(f"pool-{i}" for i in range(types)),
        capacity=_capacity(nodes, types),
        nodes=nodes,
        rates=_table(draw, shapes, types),
        history=draw(histories()),
        workers=workers,
        pool=pool,
        placed=where if placed else np.zeros((len(jobs), 0), np.int64),
        **columns,
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Nothing yet, or some finished jobs in some classes."""
    history = History()
    for number, (klass, size_s) in enumerate(draw(_FINISHED)):
        history = history.adding(klass, number, float(number), size_s)
    return history


@st.composite
def traces(draw: st.DrawFn, *, elastic: bool = True, gpus: int = 8, max_jobs: int = 10, urgent: bool = False) -> Trace:
    """A small workload of which every job fits on that many GPUs at its requested size and at its minimum.

    `urgent`: some have deadlines, in time or not, and priorities differ.
    """
    shapes = draw(st.lists(curves(), min_size=1, max_size=3))
    floors = [c.floor for c in shapes]
    fits = wishes(floors, elastic, fixed=False).filter(lambda w: max(w.low, w.asked) * w.width <= gpus * GPU)
    jobs = draw(st.lists(fits, min_size=1, max_size=max_jobs))
    seconds = [draw(st.integers(1, 200)) for _ in jobs]
    rates = _stack(shapes)[None]
    top = rates.shape[2] - 1
    # A job's requested size must make progress, or rigid policies could never finish it.
    asked = [max(w.asked, floors[w.curve]) for w in jobs]
    speed = [float(rates[0, w.curve, min(a, top)]) for w, a in zip(jobs, asked, strict=True)]
    submit = [float(draw(st.integers(0, 300))) for _ in jobs]
    due = [s + draw(_SOON) for s in submit] if urgent else None
    return Trace.build(
        "random",
        [str(i) for i in range(len(jobs))],
        submit,
        asked,
        [float(s) for s in seconds],
        work=[s * v for s, v in zip(seconds, speed, strict=True)],
        curve=[w.curve for w in jobs],
        rates=rates,
        min_workers=[w.low for w in jobs],
        max_workers=[w.high for w in jobs],
        width_milli=[w.width for w in jobs],
        classes=[draw(st.sampled_from("abc")) for _ in jobs],
        deadline_s=due,
        priority=[draw(st.integers(0, 2)) for _ in jobs] if urgent else None,
    )


@st.composite
def _nodes(draw: st.DrawFn, types: int) -> Nodes:
    kinds = draw(st.lists(st.tuples(st.integers(0, types - 1), st.sampled_from([0, 1, 2, 4, 8])), max_size=5))
    return nodes_of([devices for _, devices in kinds], [pool for pool, _ in kinds])


def _capacity(nodes: Nodes, types: int) -> Any:
    return np.bincount(nodes.pool, weights=nodes.devices * GPU, minlength=types).astype(np.int64)


def _stack(shapes: Sequence[Curve]) -> Any:
    widest = max(len(c.rates) for c in shapes)
    return np.stack([np.pad(c.rates, (0, widest - len(c.rates)), mode="edge") for c in shapes])


def _table(draw: st.DrawFn, shapes: Sequence[Curve], types: int) -> Any:
    factors = [draw(_FACTOR) for _ in range(types)]
    return np.stack([_stack(shapes) * factor for factor in factors])


def _running(draw: st.DrawFn, jobs: Sequence[Wish], nodes: Nodes, types: int, crowded: bool) -> tuple[Any, Any, Any]:
    """Who runs now, where: within capacity unless crowded."""
    free = _capacity(nodes, types)
    room = nodes.devices * GPU
    workers, pool = np.zeros(len(jobs), np.int64), np.full(len(jobs), -1, np.int64)
    where = np.zeros((len(jobs), len(nodes.name)), np.int64)
    for j, wish in enumerate(jobs):
        if not draw(_COIN):
            continue
        size = min(wish.low + draw(_SPREAD), wish.high)
        home = draw(st.integers(0, types - 1)) if types > 1 else 0
        need = size * wish.width + wish.fixed
        if need <= free[home] or crowded:
            spots = _spots(wish, size, np.where(nodes.pool == home, room, 0))
            if spots is None and not crowded:
                continue
            workers[j], pool[j] = size, home
            free[home] -= need
            if spots is not None:
                where[j] = spots
                room = room - spots * wish.width
    return workers, pool, where


def _spots(wish: Wish, size: int, room: Any) -> Any:
    """Workers per node, first node first; None when they do not fit."""
    spots = np.zeros(len(room), np.int64)
    for node, free in enumerate(room.tolist()):
        spots[node] = min(size - spots.sum(), free // wish.width)
    return spots if spots.sum() == size else None


def _wanted_columns(draw: st.DrawFn, jobs: Sequence[Wish], services: bool) -> dict[str, Any]:
    serves = np.array([services and draw(_COIN) for _ in jobs], np.bool_)
    wanted = [min(draw(_SPREAD), w.high + 2) if s else 0 for w, s in zip(jobs, serves.tolist(), strict=True)]
    step, klass, priority, resize_s, start_s = _columns([draw(_WANTS) for _ in jobs], 5)
    return {
        "job": np.cumsum(step).astype(np.int64),
        "klass": klass.astype(np.int64),
        "priority": priority.astype(np.int64),
        "requested": np.array([w.asked for w in jobs], np.int64),
        "min_workers": np.array([w.low for w in jobs], np.int64),
        "max_workers": np.array([w.high for w in jobs], np.int64),
        "width": np.array([w.width for w in jobs], np.int64),
        "fixed_milli": np.array([w.fixed for w in jobs], np.int64),
        "demand": np.zeros((len(jobs), 3), np.int64),
        "curve": np.array([w.curve for w in jobs], np.int64),
        "resize_s": resize_s,
        "start_s": start_s,
        "is_service": serves,
        "wanted": np.array(wanted, np.int64),
    }


def _past_columns(draw: st.DrawFn, jobs: Sequence[Wish], workers: Any, known: bool | None) -> dict[str, Any]:
    """A past that adds up: the times a job ran and waited fill its age, and it started if it ever ran."""
    age = np.array(sorted((draw(_AGE) for _ in jobs), reverse=True), np.float64)
    now_s = float(age.max(initial=0.0)) + draw(_MANY)
    past = _columns([draw(_PAST) for _ in jobs], 9)
    since = age * past[0]
    before = (age - since) * past[1]
    runs = workers > 0
    ran = before + np.where(runs, since, 0.0)
    changed = np.minimum(now_s, np.maximum(now_s - age, now_s - since))
    held = np.array([min(w.low + e, w.high) * w.width / GPU for w, e in zip(jobs, past[2], strict=True)], np.float64)
    hidden = past[4] > 0 if known is None else np.full(len(jobs), not known)
    return {
        "now_s": now_s,
        "submit_s": now_s - age,
        "deadline_s": now_s - age + past[5],
        "remaining": np.where(hidden, np.nan, past[3]),
        "remaining_sd": past[6],
        "done": ran * past[7],
        "ran_s": ran,
        "gpu_s": ran * held,
        "waited_s": np.maximum(0.0, age - ran),
        "started_s": np.where(before > 0, now_s - age, np.where(runs, changed, np.nan)),
        "changed_s": changed,
        "restarts": np.where(runs | (before > 0), past[8], 0).astype(np.int64),
    }


def _columns(rows: Sequence[tuple[Any, ...]], count: int) -> Any:
    """Rows of numbers, turned into columns."""
    return np.array(rows, np.float64).reshape(len(rows), count).T.copy()
