"""The question that a policy is asked about some of a cluster's jobs, and what becomes of its answer.

Nodes that a job's constraints rule out are out of its reach. Snapshots show devices, CPU and memory; an answer that
gives away more than there is of anything else is cut, and the rest decided anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.core import services
from stretto.core.decision import Memory
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot
from stretto.jobs.model import Seat
from stretto.kubernetes.landscape import Landscape
from stretto.kubernetes.model import Amounts
from stretto.server import deciding, view
from stretto.server.book import Active, Said
from stretto.server.estimates import Estimates
from stretto.server.site import Question

_TRIES = 3


class Part:
    """The question about some of the jobs."""

    def __init__(
        self,
        question: Question,
        jobs: Sequence[Active],
        landscape: Landscape,
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

    def decide(self, memory: Memory, left: Landscape | None = None) -> deciding.Outcome:
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

    def _cut(self, verdicts: Mapping[int, deciding.Verdict], landscape: Landscape) -> dict[int, deciding.Verdict]:
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

    def _left(self, landscape: Landscape, resources: Sequence[str]) -> IntArray:
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
