"""A cluster as a site: what a policy is shown of it, and what is free there at this moment.

Two questions make one decision: first the jobs that want GPUs, then those that want none, with the cores and the memory
that the first leave. Each is a snapshot like any other; in the second a device is a slice of CPU, as large as all
requests are multiples of. Nodes that a job's constraints rule out are out of its reach.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.backends.protocol import Exit, Launch
from stretto.core.decision import Memory
from stretto.core.snapshot import GPU, BoolArray, IntArray, Nodes, Snapshot
from stretto.jobs import events as e
from stretto.jobs.model import Seat, Worker
from stretto.kubernetes import capacity, fitting
from stretto.kubernetes.cluster import CPU_POOL, Cluster, gpu_memory_mib
from stretto.kubernetes.drivers import driver_for
from stretto.kubernetes.register import Entry, Register
from stretto.server import deciding, reconcile, view
from stretto.server.book import Active, Said
from stretto.server.drivers.base import Driver, Surroundings
from stretto.server.estimates import Estimates
from stretto.server.site import Question

_FOREIGN = 2**62
"""Stands for pods of others where job numbers are compared: nobody's last worker leaves for them before its
replacement has come."""


class ClusterSite:
    def __init__(self, cluster: Cluster, register: Register, estimates: Estimates) -> None:
        self._cluster, self._register, self._estimates = cluster, register, estimates

    def pools(self) -> tuple[str, ...]:
        return self._cluster.pools()

    # What a policy is shown.

    def ask(self, question: Question) -> Callable[[], deciding.Outcome]:
        room, fit = self._cluster.room(), self._cluster.fitting()
        entries = {active.number: self._register[active.number] for active in question.jobs}
        types = self._cluster.types()
        there = _There(room, self._cluster.gpu_resource, self.pools(), types, [gpu_memory_mib(n) for n in fit.nodes])
        wide = [active for active in question.jobs if active.request.width_milli]
        plain = [active for active in question.jobs if not active.request.width_milli]
        reach = {number: fit.mask(fitting.signature(entry.shape)) for number, entry in entries.items()}
        why_not = {
            number: fit.why_not(fitting.signature(entries[number].shape))
            for number, mask in reach.items()
            if not mask.any()
        }
        memory = question.memory or (None, None)
        gpus = _Part(question, wide, there.with_gpus(), reach, self._estimates, why_not)
        unit = _slice(plain)
        cpus = _Part(question, plain, there.with_cores(unit), reach, self._estimates, why_not)
        demand = {active.number: active.request.demand for active in wide}

        def decide() -> deciding.Outcome:
            first = gpus.decide(memory[0])
            if not plain:
                return deciding.Outcome(first.verdicts, (first.memory, None), first.wake_s)
            second = cpus.decide(memory[1], there.after(first.verdicts, demand).with_cores(unit) if wide else None)
            return deciding.Outcome(
                first.verdicts | second.verdicts, (first.memory, second.memory), min(first.wake_s, second.wake_s)
            )

        return decide

    # What is free now.

    def floor(self, situations: Sequence[reconcile.Situation]) -> reconcile.Floor:
        asks = {s.job: self._asks(self._register.get(s.job)) for s in situations}
        known = {worker.launch for s in situations for worker in s.workers}
        others = [
            pod
            for launch, pod in self._cluster.worker_pods.items()
            if launch not in known and pod.is_bound and not pod.is_terminal
        ]
        return Ground(self._cluster.room(anew=False), situations, asks, others)

    def _asks(self, entry: Entry | None) -> Mapping[str, int]:
        return {} if entry is None else entry.requests | {"pods": 1}

    # Drivers and launches.

    def driver(self, active: Active, around: Surroundings) -> Driver:
        return driver_for(active, around, self._register[active.number])

    def launch(self, active: Active, event: e.Launched, size: int, driver: Driver) -> Launch:
        """Command, folder and log are the template's and the cluster's business."""
        return Launch(
            id=event.launch,
            job=active.number,
            worker=event.worker,
            node=event.seat.node,
            command=(),
            cwd="",
            env=driver.environment(event.worker, event.seat, event.member, size),
            log="",
        )

    def explained(self, active: Active, worker: Worker, exit: Exit) -> Exit:
        """Its pod has said already how its log ends."""
        return exit


class _There(msgspec.Struct, frozen=True):
    """What our workers may have of every node."""

    room: capacity.Room
    gpu_resource: str
    pools: tuple[str, ...]
    types: Sequence[str]
    gpu_mib: Sequence[int]
    used: IntArray | None = None
    """[node, 3]: CPU, memory and pods that the first question has given away."""

    def with_gpus(self) -> _Landscape:
        chosen = np.array([kind != CPU_POOL for kind in self.types], np.bool_)
        devices = np.minimum(self.room.column(self.gpu_resource), self._pods())
        pool = np.array([self.pools.index(kind) for kind in self.types], np.int64)
        return self._landscape(chosen, pool, devices, GPU)

    def with_cores(self, slice_milli: int) -> _Landscape:
        chosen = np.ones(len(self.types), np.bool_)
        devices = np.minimum(self._cpu() // slice_milli, self._pods())
        pool = np.full(len(self.types), self.pools.index(CPU_POOL), np.int64)
        return self._landscape(chosen, pool, devices, slice_milli)

    def after(self, verdicts: Mapping[int, deciding.Verdict], demand: Mapping[int, tuple[int, int, int]]) -> _There:
        at = {name: i for i, name in enumerate(self.room.nodes)}
        used = np.zeros((len(at), 3), np.int64)
        for number, verdict in verdicts.items():
            cpu, mib, _ = demand[number]
            for seat in verdict.seats:
                used[at[seat.node]] += (cpu, mib, 1)
        return msgspec.structs.replace(self, used=used)

    def _cpu(self) -> IntArray:
        return self.room.cpu_milli if self.used is None else np.maximum(self.room.cpu_milli - self.used[:, 0], 0)

    def _memory(self) -> IntArray:
        return self.room.memory_mib if self.used is None else np.maximum(self.room.memory_mib - self.used[:, 1], 0)

    def _pods(self) -> IntArray:
        return self.room.pods if self.used is None else np.maximum(self.room.pods - self.used[:, 2], 0)

    def _landscape(self, chosen: BoolArray, pool: IntArray, devices: IntArray, unit: int) -> _Landscape:
        nodes = Nodes(
            name=tuple(name for name, is_in in zip(self.room.nodes, chosen.tolist(), strict=True) if is_in),
            pool=pool[chosen],
            devices=devices[chosen],
            cpu_milli=self._cpu()[chosen],
            memory_mib=self._memory()[chosen],
            gpu_memory_mib=np.array(self.gpu_mib, np.int64)[chosen],
        )
        return _Landscape(self.pools, nodes, chosen, unit)


class _Landscape(msgspec.Struct, frozen=True):
    pools: tuple[str, ...]
    nodes: Nodes
    chosen: BoolArray
    """Which nodes of the cluster these are."""
    unit_milli: int
    """What a device is: a GPU, or so much CPU."""

    def columns(self) -> Nodes:
        return self.nodes


class _Part:
    """The question about some of the jobs."""

    def __init__(
        self,
        question: Question,
        jobs: Sequence[Active],
        landscape: _Landscape,
        reach: Mapping[int, BoolArray],
        estimates: Estimates,
        why_not: Mapping[int, str],
    ) -> None:
        self._question, self._landscape, self._why_not = question, landscape, why_not
        self._reach = {active.number: reach[active.number][landscape.chosen] for active in jobs}
        self._hopeless: dict[int, Said] = {}
        self._row = {name: row for row, name in enumerate(landscape.nodes.name)}
        most = dict(question.most)
        shown = [active for active in jobs if self._could_run(active, most)]
        snapshot = view.snapshot(shown, landscape, estimates, question.now_s, most)
        width = np.array([self._width(active) for active in shown], np.int64)
        self._view = self._with_reach(msgspec.structs.replace(snapshot, width=width))

    def decide(self, memory: Memory, left: _Landscape | None = None) -> deciding.Outcome:
        """In any thread. `left`: what there is by now of the nodes that it was made for."""
        question, shown = self._question, self._view
        if left is not None:
            total = np.bincount(left.nodes.pool, left.nodes.devices * GPU, len(left.pools)).astype(np.int64)
            shown = msgspec.structs.replace(shown, nodes=left.nodes, capacity=total)
        outcome = deciding.decide(question.policy, memory, question.placement, shown, deciding.on_nodes)
        stuck = {number: deciding.Verdict((), -1, said) for number, said in self._hopeless.items()}
        return msgspec.structs.replace(outcome, verdicts=outcome.verdicts | stuck)

    def _with_reach(self, snapshot: Snapshot) -> Snapshot:
        if not len(snapshot):
            return snapshot
        reach = np.stack([self._reach[number] for number in snapshot.job.tolist()])
        return snapshot if reach.all() else msgspec.structs.replace(snapshot, reach=reach)

    def _could_run(self, active: Active, most: dict[int, int]) -> bool:
        """Whether its minimum would fit if it were alone; lowers its maximum to what would."""
        slots = self._slots(active)
        asked = active.request
        if slots >= asked.min_workers:
            if slots < asked.max_workers:
                most[active.number] = min(slots, most.get(active.number, asked.max_workers))
            return True
        told = self._why_not.get(active.number) or (
            f"{asked.min_workers} workers of {_need(asked)} do not fit on the {int(self._reach[active.number].sum())} "
            f"nodes that they may use: {slots} would, if no other job ran"
        )
        self._hopeless[active.number] = Said("fits-no-node", f"waits: {told}")
        return False

    def _width(self, active: Active) -> int:
        """Milli-devices of a worker; whoever asks for nothing counts as one slice of CPU."""
        asked = active.request
        return asked.width_milli or -(-max(asked.cpu_milli, 1) // self._landscape.unit_milli) * GPU

    def _slots(self, active: Active) -> int:
        """Workers of it that fit on all nodes within its reach, and where it is."""
        nodes, asked = self._landscape.nodes, active.request
        room = nodes.devices // max(-(-self._width(active) // GPU), 1)
        for there, needs in ((nodes.cpu_milli, asked.cpu_milli), (nodes.memory_mib, asked.memory_mib)):
            if needs:
                room = np.minimum(room, there // needs)
        reach = self._reach[active.number]
        if active.target:
            reach = reach.copy()
            reach[[row for seat in active.target if (row := self._row.get(seat.node)) is not None]] = True
        if asked.pools:
            kinds = [i for i, name in enumerate(self._landscape.pools) if name in asked.pools]
            reach = reach & np.isin(nodes.pool, kinds)
        return int(room[reach].sum())


def _slice(jobs: Sequence[Active]) -> int:
    """As much CPU as all these jobs ask for multiples of; at least a tenth of a core."""
    asked = [active.request.cpu_milli for active in jobs if active.request.cpu_milli]
    return max(math.gcd(*asked), 100) if asked else GPU


def _need(asked: Any) -> str:
    parts = [f"{asked.width_milli // GPU} GPU"] if asked.width_milli else []
    parts += [f"{asked.cpu_milli / 1000:g} cores"] if asked.cpu_milli else []
    parts += [f"{asked.memory_mib} MiB"] if asked.memory_mib else []
    return ", ".join(parts) or "nothing"


class Ground:
    """The floor of a cluster: what is left of every node beside all our workers, seen or only launched."""

    def __init__(
        self,
        room: capacity.Room,
        situations: Sequence[reconcile.Situation],
        asks: Mapping[int, Mapping[str, int]],
        others: Sequence[Any],
    ) -> None:
        self._asks = {
            job: [(room.resources.index(r), n) for r, n in some.items() if r in room.resources]
            for job, some in asks.items()
        }
        self._missing = {job: any(r not in room.resources and n for r, n in some.items()) for job, some in asks.items()}
        self._row = {name: row for row, name in enumerate(room.nodes)}
        self._left: list[list[int]] = room.room.tolist()
        self._claimed = Counter(claim.node for claim in room.claims if claim.how != "fits")
        for pod in others:
            row = self._row.get(pod.spec.node_name)
            if row is not None:
                for i, name in enumerate(room.resources):
                    self._left[row][i] -= (pod.requests | {"pods": 1}).get(name, 0)
        for s in situations:
            for worker in s.workers:
                self.take(s, worker.seat)
        self._wanted: dict[str, set[int]] = {}
        for s in situations:
            for seat in reconcile.uncovered(s.target, (worker.seat for worker in s.workers)):
                if not self.fits(s, seat):
                    self._wanted.setdefault(seat.node, set()).add(s.job)

    def fits(self, s: reconcile.Situation, seat: Seat) -> bool:
        row = self._row.get(seat.node)
        if row is None or self._missing[s.job]:
            return False
        left = self._left[row]
        return all(left[i] >= needs for i, needs in self._asks[s.job])

    def take(self, s: reconcile.Situation, seat: Seat) -> None:
        row = self._row.get(seat.node)
        if row is not None:
            left = self._left[row]
            for i, needs in self._asks[s.job]:
                left[i] -= needs

    def give(self, s: reconcile.Situation, seat: Seat) -> None:
        row = self._row.get(seat.node)
        if row is not None:
            left = self._left[row]
            for i, needs in self._asks[s.job]:
                left[i] += needs

    def awaited(self, s: reconcile.Situation, seat: Seat) -> list[int]:
        waiting = [job for job in self._wanted.get(seat.node, ()) if job != s.job]
        row = self._row.get(seat.node)
        if self._claimed[seat.node] and row is not None and min(self._left[row]) < 0:
            waiting.append(_FOREIGN)
        return waiting
