"""Random worlds with nodes, and an obviously right, slow account of what a placement takes from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec
import numpy as np
from hypothesis import strategies as st

from strategies import job, view_of
from stretto.core.placement import devices as device_level
from stretto.core.snapshot import GPU, IntArray, Nodes, Snapshot
from stretto.errors import PolicyError

PLENTY = 2**40


class Case(NamedTuple):
    """A snapshot, and what a policy decided for it."""

    view: Snapshot
    workers: IntArray
    pool: IntArray


def make(
    devices: Sequence[int],
    jobs: Sequence[dict[str, Any]],
    placed: Sequence[Sequence[int]] | None = None,
    want: Sequence[int] | None = None,
    **nodes: Any,
) -> Case:
    """By hand: devices per node, jobs as in `strategies.job` (and `demand`), where they run, what they should get."""
    n = len(jobs)
    view = view_of(list(devices), jobs)
    where = np.array(placed if placed is not None else np.zeros((n, len(devices))), np.int64).reshape(n, len(devices))
    columns = {name: np.array(value, np.int64) for name, value in nodes.items()}
    pool = np.zeros(n, np.int64)
    view = msgspec.structs.replace(
        view,
        nodes=msgspec.structs.replace(view.nodes, **columns),
        demand=np.array([j.get("demand", (0, 0, 0)) for j in jobs], np.int64).reshape(n, 3),
        placed=where,
        workers=where.sum(axis=1),
    )
    workers = np.array(want, np.int64) if want is not None else view.requested
    return Case(view, workers, pool)


def with_placed(case: Case, placed: IntArray) -> Case:
    """The same wish, after it was carried out."""
    count = placed.sum(axis=1)
    view = msgspec.structs.replace(case.view, placed=placed, workers=count, pool=np.where(count > 0, case.pool, -1))
    return case._replace(view=view)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    widths: Sequence[int] = (GPU, GPU, 2 * GPU, 4 * GPU, 250, 500, 333, 700, 0),
    demands: bool = True,
    roles: bool = True,
    pools: int = 2,
    max_nodes: int = 5,
    max_jobs: int = 8,
) -> Case:
    """Any world: some nodes down, several pools, running jobs somewhere, wishes that may be too large for it."""
    count = draw(st.integers(1, max_nodes))
    small = st.integers(0, 6)
    nodes = Nodes(
        name=tuple(f"n{i}" for i in range(count)),
        pool=np.array([draw(st.integers(0, pools - 1)) for _ in range(count)], np.int64),
        devices=np.array([draw(st.sampled_from([0, 1, 2, 4, 4, 8])) for _ in range(count)], np.int64),
        cpu_milli=np.array([draw(small) * 1000 if demands else PLENTY for _ in range(count)], np.int64),
        memory_mib=np.array([draw(small) * 1024 if demands else PLENTY for _ in range(count)], np.int64),
        gpu_memory_mib=np.array([draw(st.sampled_from([16, 32])) for _ in range(count)], np.int64),
    )
    jobs = []
    for _ in range(draw(st.integers(0, max_jobs))):
        low = draw(st.sampled_from([1, 1, 1, 2, 3]))
        top = low + draw(st.integers(0, 6))
        width = draw(st.sampled_from(widths))
        fixed = draw(st.sampled_from([0, 0, 0, 500, GPU])) if roles else 0
        jobs.append(job(min_workers=low, max_workers=top, width=width, fixed_milli=fixed))
    n = len(jobs)
    view = view_of([1], jobs)
    low, high = view.min_workers.tolist(), view.max_workers.tolist()
    want = np.array([draw(st.sampled_from([0, *range(low[j], high[j] + 1)])) for j in range(n)], np.int64)
    pool = np.array([draw(st.integers(0, pools - 1)) for _ in range(n)], np.int64)
    asks = st.tuples(st.sampled_from([0, 0, 500, 1000]), st.sampled_from([0, 0, 512]), st.sampled_from([0, 0, 6, 20]))
    demand = np.array([draw(asks) if demands else (0, 0, 0) for _ in range(n)], np.int64).reshape(n, 3)
    view = msgspec.structs.replace(
        view,
        pools=tuple(f"p{i}" for i in range(pools)),
        capacity=np.bincount(nodes.pool, nodes.devices * GPU, pools).astype(np.int64),
        rates=np.repeat(view.rates, pools, axis=0),
        nodes=nodes,
        demand=demand,
        placed=np.zeros((n, count), np.int64),
    )
    now_pool = np.where([draw(st.integers(0, 3)) > 0 for _ in range(n)], pool, 0).astype(np.int64)
    placed = _anywhere(draw, view, now_pool)
    return with_placed(Case(view, want, now_pool), placed)._replace(pool=pool)


def _anywhere(draw: st.DrawFn, view: Snapshot, pool: IntArray) -> IntArray:
    """Running workers in some valid places."""
    placed = view.placed.copy()
    cells = [
        (j, node) for j in range(len(view)) for node in range(len(view.nodes.name)) if draw(st.integers(0, 4)) == 0
    ]
    for j, node in cells:
        trial = placed.copy()
        trial[j, node] += draw(st.integers(1, int(view.max_workers[j])))
        if trial[j].sum() <= view.max_workers[j] and not faults(view, trial, pool):
            placed = trial
    short = placed.sum(axis=1) < view.min_workers
    placed[short] = 0
    # Roles sit on a job's first node; a job less may have moved nobody else's.
    return placed if not faults(view, placed, pool) else np.zeros_like(placed)


def faults(view: Snapshot, placed: IntArray, pool: IntArray) -> list[str]:
    """Everything that is wrong with these workers on these nodes; nothing is left to the code under test."""
    wrong: list[str] = []
    for node in range(len(view.nodes.name)):
        guests = [j for j in range(len(view)) if placed[j, node] > 0]
        if guests and view.nodes.devices[node] <= 0:
            wrong.append(f"node {node} is down")
        wrong += [f"job {j} is on a node of another pool" for j in guests if pool[j] != view.nodes.pool[node]]
        for name, have in (("cpu", view.nodes.cpu_milli), ("memory", view.nodes.memory_mib)):
            used = sum(int(placed[j, node] * view.demand[j, 0 if name == "cpu" else 1]) for j in guests)
            if used > have[node]:
                wrong.append(f"node {node}: {used} {name} of {have[node]}")
        if not wrong and not _seats_exist(view, placed, pool, node):
            wrong.append(f"node {node}: no way to seat its workers")
    return wrong


def _seats_exist(view: Snapshot, placed: IntArray, pool: IntArray, node: int) -> bool:
    """Search through all ways to seat the node's workers."""
    whole, shares = 0, []
    for j in range(len(view)):
        for width, mib, count in (
            (int(view.width[j]), int(view.demand[j, 2]), int(placed[j, node])),
            (int(view.fixed_milli[j]), 0, int(placed[j, node] > 0 and placed[j, :node].sum() == 0)),
        ):
            if count and width >= GPU:
                whole += count * -(-width // GPU)
                if -(-mib // -(-width // GPU)) > view.nodes.gpu_memory_mib[node]:
                    return False
            elif count and (width or mib):
                shares += [(width, mib)] * count
    bins = [[GPU, int(view.nodes.gpu_memory_mib[node])] for _ in range(int(view.nodes.devices[node]) - whole)]
    return int(view.nodes.devices[node]) >= whole and _fill(bins, sorted(shares, reverse=True))


def _fill(bins: list[list[int]], shares: list[tuple[int, int]]) -> bool:
    if not shares:
        return True
    milli, mib = shares[0]
    for level in sorted({tuple(left) for left in bins}):
        spot = bins.index(list(level))
        if level[0] >= milli and level[1] >= mib:
            bins[spot] = [level[0] - milli, level[1] - mib]
            if _fill(bins, shares[1:]):
                return True
            bins[spot] = list(level)
    return False


def one_more_fits(case: Case, placed: IntArray, j: int) -> bool:
    """Whether there is any node where the job could have one more worker."""
    for node in range(placed.shape[1]):
        trial = placed.copy()
        trial[j, node] += 1
        if not faults(case.view, trial, case.pool):
            return True
    return False


def every_placement(case: Case) -> list[IntArray]:
    """All placements of exactly the wanted workers, for tiny worlds."""
    nodes = len(case.view.nodes.name)
    options = [
        [row for row in product(range(want + 1), repeat=nodes) if sum(row) == want] for want in case.workers.tolist()
    ]
    tables = (np.array(rows, np.int64).reshape(len(case.view), nodes) for rows in product(*options))
    return [placed for placed in tables if not faults(case.view, placed, case.pool)]


def seats_of(
    case: Case, placed: IntArray, held: Sequence[device_level.Seat] = ()
) -> Sequence[device_level.Seat] | None:
    """The devices, or None where the device level says that there are none."""
    try:
        return device_level.assign(case.view, placed, case.pool, held)
    except PolicyError:
        return None
