"""What our workers may use of every node: all of it, less what everybody else has and what others are about to get.

Pure. `Usage` is fed every pod's changes and keeps the sums; `room` makes one pass over the nodes and the pending
foreign pods. A pending pod is counted on one node, so that we neither take what it needs nor leave where it does not
help:

a. where kube-scheduler nominated it;
b. else where it fits beside everything that runs now (the tightest such node): nobody needs to give way;
c. else, unless it may preempt our workers by itself, where the fewest of them have to go (none, where those that
   are leaving already make room);
d. nowhere, when it could not run even if all of ours left, or waits for something that is not resources.

Urgent pods choose first, older ones before younger. A pod stays with the node that was chosen for it before unless
another asks fewer workers to go, so that plans do not flap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.kubernetes import quantities
from stretto.kubernetes.fitting import Fitting, signature
from stretto.kubernetes.model import CPU, GPU, MEMORY, POD_COUNT, Amounts, Pod

IntArray: TypeAlias = NDArray[np.int64]

REFUSED_FOR = timedelta(seconds=30)
"""How long a pod that kubelet turned away holds its place: its owner makes another one soon."""

_V = TypeVar("_V")

How = Literal["nominated", "fits", "giving-way"]


class Claim(msgspec.Struct, frozen=True):
    """A pending foreign pod and where it is counted."""

    namespace: str
    name: str
    uid: str
    node: str
    how: How
    leaving: int = 0
    """How many of our workers have to go for it (that are not on their way already)."""


class Room(msgspec.Struct, frozen=True):
    """[node, resource] columns; resources are `cpu` (milli), `memory` (MiB), `pods`, then the others by name."""

    nodes: tuple[str, ...]
    resources: tuple[str, ...]
    room: IntArray
    """What our workers may have in all, those running now included; never below zero."""
    free: IntArray
    """What of that is not taken by our workers now; below zero where some have to go."""
    claims: tuple[Claim, ...]

    def column(self, resource: str) -> IntArray:
        if resource not in self.resources:
            return np.zeros(len(self.nodes), np.int64)
        return self.room[:, self.resources.index(resource)]

    def vector(self, amounts: Mapping[str, int]) -> IntArray:
        """By resource."""
        return np.array([amounts.get(name, 0) for name in self.resources], np.int64)

    @property
    def cpu_milli(self) -> IntArray:
        return self.column(CPU)

    @property
    def memory_mib(self) -> IntArray:
        return self.column(MEMORY)

    @property
    def pods(self) -> IntArray:
        return self.column(POD_COUNT)

    @property
    def devices(self) -> IntArray:
        return self.column(GPU)

    @property
    def choices(self) -> dict[str, str]:
        """uid → node: pass it to the next `room` as `before`."""
        return {claim.uid: claim.node for claim in self.claims}


class Held(NamedTuple):
    """What one worker of ours holds of its node."""

    amounts: Amounts
    is_leaving: bool


def holds(pod: Pod) -> Amounts:
    """What a pod takes of its node; what cannot be understood counts for nothing."""
    try:
        asked = pod.requests
    except ValueError:
        asked = {}
    return quantities.counted(asked) | {POD_COUNT: 1}


def larger(left: Amounts, right: Amounts) -> Amounts:
    """The larger of both, of each resource."""
    if not left or left == right:
        return right
    return {name: max(left.get(name, 0), right.get(name, 0)) for name in left | right}


class Usage:
    """Who uses what, kept up to date pod by pod. `pods` is one of the resources: every pod holds one of it."""

    def __init__(self, is_ours: Callable[[Pod], bool]) -> None:
        """`is_ours` must depend on nothing but the pod: what was added is taken away by the same answer."""
        self._is_ours = is_ours
        self.foreign: dict[str, Amounts] = {}
        """Node → what pods that are not ours hold there."""
        self.ours: dict[str, Amounts] = {}
        """Node → what our workers hold there."""
        self.workers: dict[str, dict[str, Held]] = {}
        """Node → uid → what this worker of ours holds."""
        self.pending: dict[str, tuple[Pod, Amounts]] = {}
        """Foreign pods that wait for a node, by uid."""
        self.refused: dict[str, tuple[Pod, Amounts]] = {}
        """Foreign pods that kubelet turned away for want of resources, by uid."""

    def change(self, old: Pod | None, new: Pod | None) -> None:
        """Follow one pod; fits `Watched.on_change`."""
        if old is not None:
            self._count(old, -1)
        if new is not None:
            self._count(new, +1)

    def _count(self, pod: Pod, sign: int) -> None:
        uid, node = pod.metadata.uid, pod.spec.node_name
        is_ours = self._is_ours(pod)
        if pod.is_terminal:
            if node and not is_ours and pod.status.phase == "Failed" and pod.status.reason.startswith("OutOf"):
                _keep(self.refused, uid, (pod, holds(pod)), sign)
        elif not node:
            if not is_ours:
                _keep(self.pending, uid, (pod, holds(pod)), sign)
        else:
            amounts = holds(pod)
            _add(self.ours if is_ours else self.foreign, node, amounts, sign)
            if is_ours:
                workers = self.workers.setdefault(node, {})
                _keep(workers, uid, Held(amounts, pod.metadata.is_leaving), sign)
                if not workers:
                    del self.workers[node]


def room(
    fitting: Fitting, usage: Usage, *, now: datetime, before: Mapping[str, str] | None = None, our_priority: int = 0
) -> Room:
    """What our workers may use of `fitting.nodes`. `before`: the last answer's `choices`."""
    columns = _Columns(fitting, usage)
    for pod, amounts in usage.refused.values():
        place = columns.place.get(pod.spec.node_name)
        if place is not None and now - _refused_at(pod) < REFUSED_FOR:
            columns.take(place, columns.vector(amounts))
    claims: list[Claim] = []
    choosing: list[tuple[Pod, IntArray]] = []
    for pod, amounts in sorted(usage.pending.values(), key=_urgency):
        nominated = columns.place.get(pod.status.nominated_node_name)
        if not _waits_for_resources(pod):
            continue
        if nominated is None:
            choosing.append((pod, columns.vector(amounts)))
        else:
            # Taken already, as far as kube-scheduler is concerned, before anybody chooses.
            columns.take(nominated, columns.vector(amounts))
            claims.append(_claim(pod, fitting.nodes[nominated].name, "nominated"))
    for pod, asked in choosing:
        earlier = columns.place.get((before or {}).get(pod.metadata.uid, ""))
        chosen = columns.choose(asked, fitting.mask(signature(pod.spec)), earlier, _cannot_preempt(pod, our_priority))
        if chosen is not None:
            place, how, leaving = chosen
            columns.take(place, asked)
            claims.append(_claim(pod, fitting.nodes[place].name, how, leaving))
    return Room(
        nodes=tuple(node.name for node in fitting.nodes),
        resources=columns.resources,
        room=np.maximum(columns.left, 0),
        free=columns.free,
        claims=tuple(claims),
    )


class _Columns:
    """The arithmetic of one pass: [node, resource] arrays that claims are taken from."""

    def __init__(self, fitting: Fitting, usage: Usage) -> None:
        names = [node.name for node in fitting.nodes]
        self.place = {name: place for place, name in enumerate(names)}
        waiting = (amounts for _, amounts in (*usage.pending.values(), *usage.refused.values()))
        known: set[str] = set().union(*fitting.allocatable, *usage.foreign.values(), *usage.ours.values(), *waiting)
        self.resources = (*_FIRST, *sorted(known.difference(_FIRST)))
        self._vectors: dict[tuple[tuple[str, int], ...], IntArray] = {}
        self._usage = usage
        self._names = names
        self._allocatable = self._filled(fitting.allocatable)
        self.ours = self._filled(usage.ours.get(name, {}) for name in names)
        self.left = self._allocatable - self._filled(usage.foreign.get(name, {}) for name in names)
        """What there would be if all of ours left."""
        self.free = self.left - self.ours
        """What there is beside all of ours."""
        self._coming = np.zeros_like(self.left)
        """What our workers give back that are leaving, or have to go for a claim."""
        self._staying: dict[int, list[IntArray]] | None = None
        self._largest = np.zeros_like(self.left)

    def vector(self, amounts: Amounts) -> IntArray:
        """Not to be written to: pods that ask for the same share it."""
        key = tuple(amounts.items())
        known = self._vectors.get(key)
        if known is None:
            known = self._vectors[key] = np.array([amounts.get(name, 0) for name in self.resources], np.int64)
        return known

    def take(self, place: int, asked: IntArray) -> None:
        self.left[place] -= asked
        self.free[place] -= asked

    def choose(
        self, asked: IntArray, allowed: NDArray[np.bool_], earlier: int | None, may_give_way: bool
    ) -> tuple[int, How, int] | None:
        """(b), (c) or (d): the node, and how many of our workers have to go."""
        needed = np.flatnonzero(asked)
        wanted = asked[needed]
        free = self.free[:, needed]
        fits = allowed & (free >= wanted).all(axis=1)
        if fits.any():
            if earlier is not None and fits[earlier]:
                return earlier, "fits", 0
            return self._tightest(free - wanted, needed, fits), "fits", 0
        if not may_give_way:
            return None
        possible = allowed & (self.left[:, needed] >= wanted).all(axis=1)
        return self._cheapest(wanted, needed, possible, earlier) if possible.any() else None

    def _tightest(self, over: IntArray, needed: NDArray[np.intp], fits: NDArray[np.bool_]) -> int:
        """Where the least is left over, as shares of the node."""
        shares = (over / np.maximum(self._allocatable[:, needed], 1)).sum(axis=1)
        return int(np.argmin(np.where(fits, shares, np.inf)))

    def _cheapest(
        self, wanted: IntArray, needed: NDArray[np.intp], possible: NDArray[np.bool_], earlier: int | None
    ) -> tuple[int, How, int]:
        """Where the fewest of ours have to go. Nodes are tried in order of a bound from below, most never."""
        staying = self._workers_that_stay()
        missing = np.maximum(wanted - (self.free[:, needed] + self._coming[:, needed]), 0)
        largest = self._largest[:, needed]
        # A node with something missing and nobody to give it is not possible, whatever the division says.
        bound = np.where(missing > 0, -(-missing // np.maximum(largest, 1)), 0).max(axis=1)
        rank = 2 * bound + 1
        if earlier is not None:
            rank[earlier] -= 1
        places = np.flatnonzero(possible)
        best: tuple[int, int] | None = None
        going: list[int] = []
        for place in places[np.argsort(rank[places], kind="stable")].tolist():
            if best is not None and (int(rank[place]), place) >= best:
                break
            gone = _fewest(missing[place], [worker[needed] for worker in staying.get(place, ())])
            found = 2 * len(gone) + (place != earlier), place
            if best is None or found < best:
                best, going = found, gone
        assert best is not None
        place = best[1]
        workers = staying.get(place, [])
        self._coming[place] += sum((workers[one] for one in going), np.zeros_like(self._coming[place]))
        staying[place] = [worker for one, worker in enumerate(workers) if one not in going]
        return place, "giving-way", len(going)

    def _workers_that_stay(self) -> dict[int, list[IntArray]]:
        """Our workers by node, in the order of their uids; worked out when somebody first has to give way."""
        if self._staying is None:
            self._staying = {}
            for place, name in enumerate(self._names):
                for _, held in sorted(self._usage.workers.get(name, {}).items()):
                    worker = self.vector(held.amounts)
                    if held.is_leaving:
                        self._coming[place] += worker
                    else:
                        self._staying.setdefault(place, []).append(worker)
            for place, workers in self._staying.items():
                self._largest[place] = np.max(workers, axis=0)
        return self._staying

    def _filled(self, rows: Iterable[Amounts]) -> IntArray:
        filled = [[row.get(name, 0) for name in self.resources] for row in rows]
        return np.array(filled, np.int64).reshape(len(filled), len(self.resources))


_FIRST = (CPU, MEMORY, POD_COUNT)


def _fewest(missing: IntArray, workers: list[IntArray]) -> list[int]:
    """Which workers to let go until nothing is missing: always the one that gives most of what is, the smallest of
    several such. Exact for one resource and for workers of one size; otherwise at worst a few too many."""
    missing = missing.copy()
    scale = np.maximum(missing, 1)
    left = list(range(len(workers)))
    going: list[int] = []
    while (missing > 0).any():
        gains = {one: float((np.minimum(workers[one], missing) / scale).sum()) for one in left}
        best = min(left, key=lambda one: (-gains[one], *workers[one].tolist(), one))
        left.remove(best)
        going.append(best)
        missing = np.maximum(missing - workers[best], 0)
    return going


def _keep(kept: dict[str, _V], uid: str, value: _V, sign: int) -> None:
    if sign > 0:
        kept[uid] = value
    else:
        kept.pop(uid, None)


def _add(totals: dict[str, Amounts], node: str, amounts: Amounts, sign: int) -> None:
    total = totals.setdefault(node, {})
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + sign * amount
        if not total[name]:
            del total[name]
    if not total:
        del totals[node]


def _refused_at(pod: Pod) -> datetime:
    """Kubelet stamps a start time on what it refuses, too."""
    moments = [moment for moment in (pod.status.start_time, pod.metadata.creation_timestamp) if moment is not None]
    return max(moments, default=datetime.min.replace(tzinfo=UTC))


def _urgency(waiting: tuple[Pod, Amounts]) -> tuple[int, float, str]:
    pod, _ = waiting
    created = pod.metadata.creation_timestamp
    return -pod.spec.priority, created.timestamp() if created else 0.0, pod.metadata.uid


def _waits_for_resources(pod: Pod) -> bool:
    """Whether a node is all it lacks: not leaving, not gated, and not found unschedulable for something else."""
    if pod.metadata.is_leaving or pod.spec.scheduling_gates:
        return False
    scheduled = pod.condition("PodScheduled")
    if scheduled is None or scheduled.reason != "Unschedulable" or not scheduled.message:
        return True
    return "Insufficient" in scheduled.message or "Too many pods" in scheduled.message


def _cannot_preempt(pod: Pod, our_priority: int) -> bool:
    return pod.spec.priority <= our_priority or pod.spec.preemption_policy == "Never"


def _claim(pod: Pod, node: str, how: How, leaving: int = 0) -> Claim:
    return Claim(pod.metadata.namespace, pod.metadata.name, pod.metadata.uid, node, how, leaving)
