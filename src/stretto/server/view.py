"""The book as a snapshot: what a policy may look at, made of targets.

A job that something holds back before any policy is asked (dependencies, a quota, a back-off, its own wish) is not in
it; `held` says why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.backends.protocol import Node
from stretto.core.snapshot import GPU, IntArray, Nodes, Snapshot
from stretto.server.book import Active
from stretto.server.estimates import Estimates, Shape


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may have at a time; None: no limit."""

    devices: float | None = None
    jobs: int | None = None


class Hold(msgspec.Struct, frozen=True):
    """Why a job is not even considered: a stable name, and the sentence."""

    name: str
    text: str
    until_s: float = math.inf
    """When that changes by itself."""


class Cluster(msgspec.Struct, frozen=True):
    nodes: tuple[Node, ...]
    drained: frozenset[str] = frozenset()
    """Nodes that are to be left."""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.pool for node in self.nodes)) or ("cpu",)

    def columns(self) -> Nodes:
        pools = self.pools
        rows = [
            (
                pools.index(node.pool),
                0 if node.name in self.drained else node.devices,
                0 if node.name in self.drained else node.cpu_milli,
                0 if node.name in self.drained else node.memory_mib,
                node.gpu_memory_mib,
            )
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


def snapshot(
    jobs: Sequence[Active], cluster: Cluster, estimates: Estimates, now_s: float, most: Mapping[int, int]
) -> Snapshot:
    """All these jobs, in order of number. `most` lowers the maximum of some (quotas)."""
    nodes, pools = cluster.columns(), cluster.pools
    rows = [_row(active, now_s, most, estimates) for active in jobs]
    table = np.array(rows, np.float64).reshape(len(rows), len(_COLUMNS))
    columns: dict[str, Any] = {name: table[:, i] for i, name in enumerate(_COLUMNS)}
    columns |= {name: columns[name].astype(np.int64) for name in _WHOLE}
    rates, curve = estimates.table([_shape(active) for active in jobs], pools)
    step = columns.pop("step")
    capacity = np.bincount(nodes.pool, nodes.devices * GPU, len(pools)).astype(np.int64)
    return Snapshot(
        now_s=now_s,
        pools=pools,
        capacity=capacity,
        nodes=nodes,
        rates=rates,
        history=estimates.history(),
        curve=curve,
        demand=np.array([a.request.demand for a in jobs], np.int64).reshape(len(jobs), 3),
        width=_widths(jobs, nodes),
        is_service=np.array([a.request.is_service for a in jobs], np.bool_),
        placed=_placed(jobs, nodes),
        step=step if (step != 1).any() else None,
        **columns,
    )


_COLUMNS = (
    "job", "klass", "priority", "requested", "min_workers", "max_workers", "step", "fixed_milli", "workers", "pool",
    "wanted", "restarts", "submit_s", "deadline_s", "resize_s", "start_s", "remaining", "remaining_sd", "done",
    "ran_s", "gpu_s", "waited_s", "started_s", "changed_s",
)  # fmt: skip
_WHOLE = _COLUMNS[:12]

_COSTS_S = {"elastic": (0.2, 0.5), "restart": (10.0, 5.0), "rigid": (1e9, 5.0), "service": (1.0, 2.0)}
"""What a resize and a start cost a job of each level, until it was measured."""


def _row(active: Active, now_s: float, most: Mapping[int, int], estimates: Estimates) -> tuple[float, ...]:
    job, asked, progress = active.job, active.request, active.progress
    high = min(asked.max_workers, most.get(job.number, asked.max_workers))
    left = math.nan if progress.total is None else max(0.0, float(progress.total - progress.steps))
    resize_s, start_s = _COSTS_S[job.level]
    span_s, held = max(0.0, now_s - job.changed_s), len(job.workers)
    return (
        job.number, estimates.klass(asked.klass), asked.priority, min(asked.requested, high), asked.min_workers, high,
        asked.step, asked.fixed_milli, len(active.target), active.pool if active.target else -1, active.wanted,
        job.starts + job.resizes, job.submitted_s, job.submitted_s + asked.deadline_s, resize_s, start_s,
        left, 0.0, progress.steps,
        job.ran_s + (span_s if held else 0.0),
        job.device_s + span_s * held * job.width_milli / GPU,
        job.waited_s + (span_s if job.phase == "queued" else 0.0),
        math.nan if job.started_s is None else job.started_s, job.changed_s,
    )  # fmt: skip


def _shape(active: Active) -> Shape:
    asked = active.request
    dear = asked.level == "restart"
    return Shape(active.number, asked.klass, asked.min_workers, asked.max_workers, asked.pools, dear)


def _widths(jobs: Sequence[Active], nodes: Nodes) -> IntArray:
    """Milli-GPU per worker; who asked for memory alone is counted by the smallest device."""
    smallest = int(min((mib for mib in nodes.gpu_memory_mib.tolist() if mib), default=0))
    return np.array([a.request.share_milli(smallest) for a in jobs], np.int64)


def _placed(jobs: Sequence[Active], nodes: Nodes) -> IntArray:
    """[job, node] targets. A job that was asked to move counts as if it were there: placements keep what is placed."""
    at = {name: i for i, name in enumerate(nodes.name)}
    placed = np.zeros((len(jobs), len(nodes.name)), np.int64)
    for j, active in enumerate(jobs):
        for seat in active.target:
            node = active.job.node or seat.node
            if node in at:
                placed[j, at[node]] += 1
    return placed


# What is not considered.


def held(
    jobs: Iterable[Active], names: Mapping[str, int], quotas: Mapping[str, Quota], now_s: float
) -> tuple[dict[int, Hold], dict[int, int]]:
    """Who is held back and why, and the maximum of those whose user's quota lowers it."""
    holds: dict[int, Hold] = {}
    by_user: dict[str, list[Active]] = defaultdict(list)
    for active in jobs:
        hold = _hold(active, names, now_s)
        if hold is not None:
            holds[active.number] = hold
        elif (quota := quotas.get(active.job.user, quotas.get("*"))) is not None and quota.devices is not None:
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
    before = [name for name in active.file.after if names.get(name, job.number) != job.number]
    if before and not job.workers:
        return Hold("dependency", f"waits until {', '.join(before)} has ended")
    return None


def _within(jobs: list[Active], devices: float, holds: dict[int, Hold], most: dict[int, int]) -> None:
    """Minimums first, in order: who has workers, is more urgent, came earlier; then growth in the same order."""
    order = sorted(jobs, key=lambda a: (not a.target, -a.request.priority, a.number))
    left = round(devices * GPU)
    inside: list[Active] = []
    for active in order:
        least = active.request.min_workers * active.request.width_milli
        if least > left:
            used = devices - left / GPU
            text = f"waits: its user may have {devices:g} devices and its other jobs hold {used:g} of them"
            holds[active.number] = Hold("quota", text)
            continue
        left -= least
        inside.append(active)
    for active in inside:
        asked = active.request
        more = min(asked.max_workers - asked.min_workers, left // asked.width_milli if asked.width_milli else left)
        most[active.number] = asked.min_workers + more
        left -= more * asked.width_milli
