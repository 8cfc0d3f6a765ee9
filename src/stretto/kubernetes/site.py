"""A cluster as a site: what a policy is shown of it, and what is free there at this moment.

Two questions make one decision: first the jobs that want GPUs, then those that want none, with what the first leave.
Each is a snapshot like any other; in the second a device is a slice of CPU, as large as all requests are multiples of.
Nodes that a job's constraints rule out are out of its reach. Snapshots show devices, CPU and memory; an answer that
gives away more than there is of anything else is cut, and the rest decided anew.

A worker counts as what its pod holds; one that is still to come, as its template and at least as those of its job that
are there: a template may have been changed since, and admission may make pods larger than it says.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from stretto.backends.protocol import Exit, Launch
from stretto.core import services
from stretto.core.decision import Memory
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU, BoolArray, IntArray, Nodes, Snapshot
from stretto.jobs import events as e
from stretto.jobs.model import Seat, Worker
from stretto.kubernetes import capacity, fitting, pods, quantities
from stretto.kubernetes.cluster import CPU_POOL, Cluster, gpu_memory_mib, job_of
from stretto.kubernetes.drivers import driver_for
from stretto.kubernetes.model import CPU, MEMORY, POD_COUNT, Amounts, Pod
from stretto.kubernetes.register import Entry, Register
from stretto.server import deciding, reconcile, view
from stretto.server.book import Active, Said
from stretto.server.drivers.base import Driver, Surroundings
from stretto.server.estimates import Estimates
from stretto.server.site import Question

_FOREIGN = 2**62
"""Stands for pods of others where job numbers are compared: nobody's last worker leaves for them before its
replacement has come."""
_TRIES = 3
_OTHERWISE = frozenset({CPU, MEMORY, POD_COUNT})
"""What snapshots show besides devices."""


class ClusterSite:
    def __init__(self, cluster: Cluster, register: Register, estimates: Estimates) -> None:
        self._cluster, self._register, self._estimates = cluster, register, estimates
        self._enlarged: dict[int, tuple[Amounts, Amounts]] = {}
        """By job: what its template asks for, and what a pod made from it holds if that is more."""
        cluster.on_worker(self._measure)

    def pools(self) -> tuple[str, ...]:
        return self._cluster.pools()

    # What a policy is shown.

    def ask(self, question: Question) -> Callable[[], deciding.Outcome]:
        room, fit = self._cluster.room(), self._cluster.fitting()
        entries = {active.number: self._register[active.number] for active in question.jobs}
        needs = {number: self._needs(entry) for number, entry in entries.items()}
        jobs = [self._as_large(active, needs[active.number]) for active in question.jobs]
        types = self._cluster.types()
        there = _There(room, self._cluster.gpu_resource, self.pools(), types, [gpu_memory_mib(n) for n in fit.nodes])
        wide = [active for active in jobs if active.request.width_milli]
        plain = [active for active in jobs if not active.request.width_milli]
        reach = {number: fit.mask(fitting.signature(entry.shape)) for number, entry in entries.items()}
        why_not = {
            number: fit.why_not(fitting.signature(entries[number].shape))
            for number, mask in reach.items()
            if not mask.any()
        }
        memory = question.memory or (None, None)
        gpus = _Part(question, wide, there.with_gpus(), reach, needs, self._estimates, why_not)
        unit = _slice(plain)
        cpus = _Part(question, plain, there.with_cores(unit), reach, needs, self._estimates, why_not)

        def decide() -> deciding.Outcome:
            first = gpus.decide(memory[0])
            if not plain:
                return deciding.Outcome(first.verdicts, (first.memory, None), first.wake_s)
            second = cpus.decide(memory[1], there.after(first.verdicts, needs).with_cores(unit) if wide else None)
            return deciding.Outcome(
                first.verdicts | second.verdicts, (first.memory, second.memory), min(first.wake_s, second.wake_s)
            )

        return decide

    # What is free now.

    def floor(self, situations: Sequence[reconcile.Situation]) -> reconcile.Floor:
        held, where = self._cluster.held, self._cluster.worker_pods
        asks = {s.job: self._needs(self._register.get(s.job)) for s in situations}
        known = {worker.launch for s in situations for worker in s.workers}
        others = [(where[launch].spec.node_name, amounts) for launch, amounts in held.items() if launch not in known]
        return Ground(self._cluster.room(anew=False), situations, asks, held, others)

    # How large workers are.

    def _needs(self, entry: Entry | None) -> Amounts:
        """What a worker that is still to come takes of its node."""
        if entry is None:
            return {}
        needs = quantities.counted(entry.requests) | {POD_COUNT: 1}
        template, enlarged = self._enlarged.get(entry.number, ({}, {}))
        if enlarged and template == entry.requests:
            needs = capacity.larger(needs, enlarged)
        return capacity.larger(needs, self._cluster.largest(*entry.key))

    def _as_large(self, active: Active, needs: Amounts) -> Active:
        """As policies are to see it."""
        cpu, mib, milli = needs.get(CPU, 0), needs.get(MEMORY, 0), needs.get(self._cluster.gpu_resource, 0) * GPU
        asked = active.request
        if (cpu, mib, milli) == (asked.cpu_milli, asked.memory_mib, asked.width_milli):
            return active
        seen = copy.copy(active)
        seen.request = msgspec.structs.replace(asked, cpu_milli=cpu, memory_mib=mib, width_milli=milli)
        seen.row = None
        return seen

    def _measure(self, old: Pod | None, new: Pod | None) -> None:
        """A new pod that admission made larger than its template (a LimitRange, a webhook, a RuntimeClass): the next
        ones will be as large, also when this one has gone."""
        if old is not None or new is None or (entry := self._register.of(job_of(new))) is None:
            return
        held = self._cluster.held.get(pods.launch_of(new), {})
        template = entry.requests | {POD_COUNT: 1}
        if capacity.larger(template, held) == template:
            self._enlarged.pop(entry.number, None)
        elif self._enlarged.get(entry.number) != (entry.requests, held):
            living = {number: known for number, known in self._enlarged.items() if self._register.get(number)}
            self._enlarged = living | {entry.number: (entry.requests, held)}
            self._cluster.changed()

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

    def with_gpus(self) -> _Landscape:
        chosen = np.array([kind != CPU_POOL for kind in self.types], np.bool_)
        devices = np.minimum(self.room.column(self.gpu_resource), self.room.pods)
        pool = np.array([self.pools.index(kind) for kind in self.types], np.int64)
        return self._landscape(chosen, pool, devices, GPU)

    def with_cores(self, slice_milli: int) -> _Landscape:
        chosen = np.ones(len(self.types), np.bool_)
        devices = np.minimum(self.room.cpu_milli // slice_milli, self.room.pods)
        pool = np.full(len(self.types), self.pools.index(CPU_POOL), np.int64)
        return self._landscape(chosen, pool, devices, slice_milli)

    def after(self, verdicts: Mapping[int, deciding.Verdict], needs: Mapping[int, Amounts]) -> _There:
        """What is left when these have what they were given."""
        at = {name: i for i, name in enumerate(self.room.nodes)}
        left = self.room.room.copy()
        for number, verdict in verdicts.items():
            np.subtract.at(left, [at[seat.node] for seat in verdict.seats], self.room.vector(needs[number]))
        return msgspec.structs.replace(self, room=msgspec.structs.replace(self.room, room=np.maximum(left, 0)))

    def _landscape(self, chosen: BoolArray, pool: IntArray, devices: IntArray, unit: int) -> _Landscape:
        nodes = Nodes(
            name=tuple(name for name, is_in in zip(self.room.nodes, chosen.tolist(), strict=True) if is_in),
            pool=pool[chosen],
            devices=devices[chosen],
            cpu_milli=self.room.cpu_milli[chosen],
            memory_mib=self.room.memory_mib[chosen],
            gpu_memory_mib=np.array(self.gpu_mib, np.int64)[chosen],
        )
        return _Landscape(self.pools, nodes, self.room, _OTHERWISE | {self.gpu_resource}, chosen, unit)


class _Landscape(msgspec.Struct, frozen=True):
    pools: tuple[str, ...]
    nodes: Nodes
    room: capacity.Room
    shown: frozenset[str]
    """The resources that are in `nodes`."""
    chosen: BoolArray
    """Which nodes of the cluster these are."""
    unit_milli: int
    """What a device is: a GPU, or so much CPU."""

    def columns(self) -> Nodes:
        return self.nodes

    def hidden(self, needs: Amounts) -> Amounts:
        """What is asked for and no snapshot shows."""
        return {resource: amount for resource, amount in needs.items() if resource not in self.shown}

    def there(self, resource: str) -> IntArray:
        return self.room.column(resource)[self.chosen]


class _Part:
    """The question about some of the jobs."""

    def __init__(
        self,
        question: Question,
        jobs: Sequence[Active],
        landscape: _Landscape,
        allowed: Mapping[int, BoolArray],
        needs: Mapping[int, Amounts],
        estimates: Estimates,
        why_not: Mapping[int, str],
    ) -> None:
        self._question, self._landscape, self._why_not = question, landscape, why_not
        self._jobs = {active.number: active for active in jobs}
        self._hidden = {n: hidden for n in self._jobs if (hidden := landscape.hidden(needs[n]))}
        self._there = {r: landscape.there(r) for r in set().union(*self._hidden.values())}
        self._rooms: dict[tuple[Any, ...], IntArray] = {}
        self._allowed = {number: allowed[number][landscape.chosen] for number in self._jobs}
        self._reach = {number: self._within_reach(number) for number in self._jobs}
        self._hopeless: dict[int, deciding.Verdict] = {}
        self._row = {name: row for row, name in enumerate(landscape.nodes.name)}
        most = dict(question.most)
        shown = [active for active in jobs if self._could_run(active, most)]
        snapshot = view.snapshot(shown, landscape, estimates, question.now_s, most)
        width = np.array([self._width(active) for active in shown], np.int64)
        self._view = self._with_reach(msgspec.structs.replace(snapshot, width=width))

    def decide(self, memory: Memory, left: _Landscape | None = None) -> deciding.Outcome:
        """In any thread. `left`: what there is by now of the nodes that it was made for."""
        question, shown, landscape = self._question, self._view, left or self._landscape
        if left is not None:
            total = np.bincount(left.nodes.pool, left.nodes.devices * GPU, len(left.pools)).astype(np.int64)
            shown = msgspec.structs.replace(shown, nodes=left.nodes, capacity=total)
        without = dict(self._hopeless)
        for _ in range(_TRIES):
            outcome = deciding.decide(question.policy, memory, question.placement, shown, deciding.on_nodes)
            cut = self._cut(outcome.verdicts, landscape)
            short = {n: len(v.seats) for n, v in cut.items() if len(v.seats) < len(outcome.verdicts[n].seats)}
            outcome = msgspec.structs.replace(outcome, verdicts=outcome.verdicts | cut | without)
            if not short:
                break
            without |= {number: cut[number] for number, got in short.items() if not got}
            shown = _with_at_most(shown, short)
        return outcome

    def _within_reach(self, number: int) -> BoolArray:
        """The nodes that are allowed and have enough for one worker of what is hidden."""
        reach = self._allowed[number]
        for resource, needs in self._hidden.get(number, {}).items():
            reach = reach & (self._there[resource] >= needs)
        return reach

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
            f"{asked.min_workers} workers of {self._need(active)} do not fit on the "
            f"{int(self._allowed[active.number].sum())} nodes that they may use: {slots} would, if no other job ran"
        )
        self._hopeless[active.number] = deciding.Verdict((), -1, Said("fits-no-node", f"waits: {told}"))
        return False

    def _need(self, active: Active) -> str:
        asked = active.request
        parts = [f"{asked.width_milli // GPU} GPU"] if asked.width_milli else []
        parts += [f"{asked.cpu_milli / 1000:g} cores"] if asked.cpu_milli else []
        parts += [f"{asked.memory_mib} MiB"] if asked.memory_mib else []
        for resource, amount in self._hidden.get(active.number, {}).items():
            parts.append(f"{amount} {resource}" if "/" in resource else f"{amount} MiB {resource}")
        return ", ".join(parts) or "nothing"

    def _width(self, active: Active) -> int:
        """Milli-devices of a worker; whoever asks for nothing counts as one slice of CPU."""
        asked = active.request
        return asked.width_milli or -(-max(asked.cpu_milli, 1) // self._landscape.unit_milli) * GPU

    def _devices(self, active: Active) -> int:
        return max(-(-self._width(active) // GPU), 1)

    def _slots(self, active: Active) -> int:
        """Workers of it that fit on all nodes within its reach, and where it is."""
        asked, reach = active.request, self._reach[active.number]
        if active.target:
            reach = reach.copy()
            reach[self._rows(active.target)] = True
        if asked.pools:
            kinds = [i for i, name in enumerate(self._landscape.pools) if name in asked.pools]
            reach = reach & np.isin(self._landscape.nodes.pool, kinds)
        return int(self._room_for(active)[reach].sum())

    def _room_for(self, active: Active) -> IntArray:
        """Workers of it that each node holds; worked out once for all jobs that ask for the same."""
        nodes, asked = self._landscape.nodes, active.request
        hidden = self._hidden.get(active.number, {})
        shape = self._devices(active), asked.cpu_milli, asked.memory_mib, *hidden.items()
        room = self._rooms.get(shape)
        if room is None:
            room = nodes.devices // self._devices(active)
            shown = (nodes.cpu_milli, asked.cpu_milli), (nodes.memory_mib, asked.memory_mib)
            for there, needs in (*shown, *((self._there[resource], needs) for resource, needs in hidden.items())):
                room = np.minimum(room, there // needs) if needs else room
            self._rooms[shape] = room
        return room

    def _rows(self, seats: Iterable[Seat]) -> list[int]:
        return [row for seat in seats if (row := self._row.get(seat.node)) is not None]

    # What no policy sees.

    def _cut(self, verdicts: Mapping[int, deciding.Verdict], landscape: _Landscape) -> dict[int, deciding.Verdict]:
        """The verdicts that change when the hidden resources are counted: such jobs get other places, or fewer.

        Everybody's minimum comes first, in the order of who has workers, is more urgent, came earlier; then the rest.
        """
        asking = [self._jobs[n] for n in self._hidden if n in verdicts and verdicts[n].seats]
        if not asking:
            return {}
        resources = sorted({resource for active in asking for resource in self._hidden[active.number]})
        wished = {active.number: self._rows(verdicts[active.number].seats) for active in asking}
        left = self._left(landscape, resources)
        for active in asking:
            np.subtract.at(left, wished[active.number], self._vector(active, resources))
        if (left >= 0).all():
            return {}
        left = self._left(landscape, resources)
        for number, verdict in verdicts.items():
            if number not in wished:
                np.subtract.at(left, self._rows(verdict.seats), self._vector(self._jobs[number], resources))
        asking.sort(key=lambda active: (not active.target, -active.request.priority, active.number))
        places = {}
        for active in asking:
            reach = self._reach[active.number] & (landscape.nodes.pool == verdicts[active.number].pool)
            places[active.number] = _Places(left, self._vector(active, resources), wished[active.number], reach)
        for active in asking:
            places[active.number].fill(active.request, active.request.min_workers)
        for active in asking:
            if places[active.number].given:
                places[active.number].fill(active.request, len(wished[active.number]))
        return {n: self._recut(n, verdicts[n], some.given) for n, some in places.items() if some.given != wished[n]}

    def _left(self, landscape: _Landscape, resources: Sequence[str]) -> IntArray:
        """[node, resource]: devices, CPU and memory, then these."""
        nodes = landscape.nodes
        shown = nodes.devices, nodes.cpu_milli, nodes.memory_mib
        return np.column_stack([*shown, *(landscape.there(resource) for resource in resources)])

    def _vector(self, active: Active, resources: Sequence[str]) -> IntArray:
        """What one worker takes of it."""
        asked, hidden = active.request, self._hidden.get(active.number, {})
        shown = self._devices(active), asked.cpu_milli, asked.memory_mib
        return np.array([*shown, *(hidden.get(resource, 0) for resource in resources)], np.int64)

    def _recut(self, number: int, verdict: deciding.Verdict, rows: Sequence[int]) -> deciding.Verdict:
        seats = tuple(Seat(self._landscape.nodes.name[row]) for row in rows)
        if len(seats) == len(verdict.seats):
            return verdict._replace(seats=seats)
        scarce = ", ".join(self._hidden[number])
        if not seats:
            return deciding.Verdict((), -1, Said("no-room", f"waits: other jobs have the {scarce} that it asks for"))
        told = f"has {len(seats)} of {len(verdict.seats)} workers: there is no more {scarce} for it"
        return verdict._replace(seats=seats, ground=Said("cut-to-room", told))


class _Places:
    """Where the workers of one job may go, of what is left on every node."""

    def __init__(self, left: IntArray, asks: IntArray, wished: Sequence[int], reach: BoolArray) -> None:
        """`left` is shared, and written to."""
        self._left, self._asks, self._wished, self._reach = left, asks, wished, reach
        self.given: list[int] = []
        """The nodes, in order; one for each worker."""

    def fill(self, request: JobRequest, size: int) -> None:
        """Up to so many: where they were meant to be, and where they do not fit there, anywhere."""
        for row, count in (Counter(self._wished) - Counter(self.given)).items():
            self._take(row, min(count, size - len(self.given)))
        for row in np.flatnonzero(self._reach).tolist():
            self._take(row, size - len(self.given))
        right = max((one for one in request.sizes() if one <= len(self.given)), default=0)
        np.add.at(self._left, self.given[right:], self._asks)
        self.given = sorted(self.given[:right])

    def _take(self, row: int, count: int) -> None:
        if count <= 0:
            return
        needed = self._asks > 0
        count = min(count, int((self._left[row, needed] // self._asks[needed]).min()))
        if count > 0:
            self._left[row] -= count * self._asks
            self.given += [row] * count


def _with_at_most(shown: Snapshot, most: Mapping[int, int]) -> Snapshot:
    """With fewer workers for some; without those that get none."""
    high = np.array([most.get(n, high) for n, high in zip(shown.job.tolist(), shown.max_workers.tolist(), strict=True)])
    capped = msgspec.structs.replace(shown, max_workers=high, requested=np.minimum(shown.requested, high))
    return services.only(capped, high > 0)


def _slice(jobs: Sequence[Active]) -> int:
    """As much CPU as all these jobs ask for multiples of; at least a tenth of a core."""
    asked = [active.request.cpu_milli for active in jobs if active.request.cpu_milli]
    return max(math.gcd(*asked), 100) if asked else GPU


class Ground:
    """The floor of a cluster: what is left of every node beside all our workers, seen or only launched."""

    def __init__(
        self,
        room: capacity.Room,
        situations: Sequence[reconcile.Situation],
        asks: Mapping[int, Amounts],
        held: Mapping[str, Amounts],
        others: Iterable[tuple[str, Amounts]],
    ) -> None:
        """`asks`: what a worker to come takes, by job. `held`: what those take whose pods are known, by launch.
        `others`: nodes, and what pods of ours hold there that belong to none of these jobs."""
        column = {name: i for i, name in enumerate(room.resources)}
        self._asks = {job: [(column[r], n) for r, n in some.items() if r in column] for job, some in asks.items()}
        self._missing = {job: any(n and r not in column for r, n in some.items()) for job, some in asks.items()}
        self._row = {name: row for row, name in enumerate(room.nodes)}
        self._claimed = Counter(claim.node for claim in room.claims if claim.how != "fits")
        ours = ((w.seat.node, held.get(w.launch, asks[s.job])) for s in situations for w in s.workers)
        self._left = self._beside(room, chain(others, ours))
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
        self._change(s, seat, -1)

    def give(self, s: reconcile.Situation, seat: Seat) -> None:
        self._change(s, seat, +1)

    def _change(self, s: reconcile.Situation, seat: Seat, sign: int) -> None:
        row = self._row.get(seat.node)
        if row is not None:
            left = self._left[row]
            for i, needs in self._asks[s.job]:
                left[i] += sign * needs

    def awaited(self, s: reconcile.Situation, seat: Seat) -> list[int]:
        waiting = [job for job in self._wanted.get(seat.node, ()) if job != s.job]
        row = self._row.get(seat.node)
        if self._claimed[seat.node] and row is not None and min(self._left[row]) < 0:
            waiting.append(_FOREIGN)
        return waiting

    def _beside(self, room: capacity.Room, taken: Iterable[tuple[str, Amounts]]) -> list[list[int]]:
        """Workers of one size share their amounts: all of them are taken at once."""
        sizes: dict[int, Amounts] = {}
        rows: dict[int, list[int]] = defaultdict(list)
        for node, amounts in taken:
            row = self._row.get(node)
            if row is not None:
                sizes[id(amounts)] = amounts
                rows[id(amounts)].append(row)
        left = room.room.copy()
        for size, amounts in sizes.items():
            np.subtract.at(left, rows[size], room.vector(amounts))
        found: list[list[int]] = left.tolist()
        return found
