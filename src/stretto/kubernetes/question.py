"""The question that a policy is asked about a cluster's jobs, and what becomes of its answer.

Nodes that a job's constraints rule out are out of its reach. Snapshots show devices, CPU and memory; what gives away
more than there is of anything else is cut (`Hidden`), and the rest decided anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from stretto.core.reasons import Reason, name
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU, BoolArray, IntArray, Snapshot
from stretto.jobs.model import Seat
from stretto.kubernetes.landscape import Landscape
from stretto.kubernetes.model import Amounts
from stretto.server import deciding, view
from stretto.server.book import Active, Said
from stretto.server.estimates import Estimates
from stretto.server.site import Question

_SCARCE = name(Reason.SCARCE)


class ClusterQuestion:
    """Everything that `decide` needs, read from the book: it may run in any thread."""

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
        self._requests = {active.number: active.request for active in jobs}
        self._names = {active.number: active.job.name for active in jobs}
        self._hidden = {n: hidden for n in self._requests if (hidden := landscape.hidden(needs[n]))}
        self._there = {r: landscape.there(r) for r in set().union(*self._hidden.values())}
        self._rooms: dict[tuple[Any, ...], IntArray] = {}
        self._allowed = allowed
        self._reach = {number: self._within_reach(number) for number in self._requests}
        self._hopeless: dict[int, deciding.Verdict] = {}
        self._row = {name: row for row, name in enumerate(landscape.nodes.name)}
        most = dict(question.most)
        shown = [active for active in jobs if self._could_run(active, most)]
        snapshot = view.snapshot(shown, landscape, estimates, question.now_s, most)
        width = np.array([active.request.width_milli for active in shown], np.int64)
        self._view = self._with_reach(msgspec.structs.replace(snapshot, width=width))

    def decide(self) -> deciding.Verdicts:
        question = self._question
        fit = Hidden(self._requests, self._hidden, self._landscape, self._reach) if self._hidden else None
        decided = question.decide(self._view, question.policy, question.state, question.settings, fit)
        found = deciding.verdicts(self._view, decided, deciding.on_nodes, self._names)
        scarce = {n: self._told(n, v) for n, v in found.of.items() if v.ground.name == _SCARCE}
        return msgspec.structs.replace(found, of=found.of | scarce | self._hopeless)

    def _told(self, number: int, verdict: deciding.Verdict) -> deciding.Verdict:
        scarce = ", ".join(self._hidden[number])
        return verdict._replace(ground=Said("no-room", f"waits: other jobs have the {scarce} that it asks for"))

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
        devices = -(-asked.width_milli // GPU)
        shape = devices, asked.cpu_milli, asked.memory_mib, *hidden.items()
        room = self._rooms.get(shape)
        if room is None:
            room = np.full(len(nodes.name), asked.max_workers, np.int64)
            shown = (nodes.devices, devices), (nodes.cpu_milli, asked.cpu_milli), (nodes.memory_mib, asked.memory_mib)
            for there, needs in (*shown, *((self._there[resource], needs) for resource, needs in hidden.items())):
                room = np.minimum(room, there // needs) if needs else room
            self._rooms[shape] = room
        return room

    def _rows(self, seats: Iterable[Seat]) -> list[int]:
        return [row for seat in seats if (row := self._row.get(seat.node)) is not None]


class Hidden:
    """What no policy sees: jobs that ask for other resources get other places than were chosen for them, or fewer.

    Pinned jobs that are to stay as they are come first. Then everybody's minimum, in the order of who has workers, is
    more urgent, came earlier; then the rest.
    """

    def __init__(
        self,
        requests: Mapping[int, JobRequest],
        hidden: Mapping[int, Amounts],
        landscape: Landscape,
        reach: Mapping[int, BoolArray],
        left: IntArray | None = None,
    ) -> None:
        """`left`: [node, resource] of devices, CPU and memory, then the hidden ones; None: all that is there."""
        self._requests, self._hidden, self._landscape, self._reach = requests, hidden, landscape, reach
        self._resources = sorted({resource for some in hidden.values() for resource in some})
        nodes = landscape.nodes
        shown = nodes.devices, nodes.cpu_milli, nodes.memory_mib
        there = np.column_stack([*shown, *(landscape.there(resource) for resource in self._resources)])
        self._left: IntArray = there if left is None else left

    def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
        numbers = view.job.tolist()
        asking = [j for j, number in enumerate(numbers) if number in self._hidden and placed[j].any()]
        if not asking or (self._left - placed.T @ self._asks(numbers) >= 0)[:, 3:].all():
            return placed
        others = placed.copy()
        others[asking] = 0
        left = self._left - others.T @ self._asks(numbers)
        asks = self._asks(numbers)
        asking.sort(key=lambda j: (not view.workers[j], -int(view.priority[j]), numbers[j]))
        places = {}
        for j in asking:
            reach = self._reach[numbers[j]] & (view.nodes.pool == pool[j])
            wished = np.repeat(np.arange(placed.shape[1]), placed[j]).tolist()
            places[j] = _Places(left, asks[j], wished, reach)
        stays = view.pinned & (placed == view.placed).all(axis=1)
        for j in [j for j in asking if stays[j]]:
            places[j].fill(self._requests[numbers[j]], int(view.workers[j]))
        for j in [j for j in asking if not stays[j]]:
            places[j].fill(self._requests[numbers[j]], int(view.min_workers[j]))
        for j in asking:
            if places[j].given:
                places[j].fill(self._requests[numbers[j]], int(placed[j].sum()))
        fitted = placed.copy()
        for j, some in places.items():
            fitted[j] = np.bincount(some.given, minlength=placed.shape[1])
        return fitted

    def after(self, view: Snapshot, placed: IntArray) -> Hidden:
        left = self._left - placed.T @ self._asks(view.job.tolist())
        return Hidden(self._requests, self._hidden, self._landscape, self._reach, left)

    def _asks(self, numbers: Sequence[int]) -> IntArray:
        """[job, resource] what one worker takes."""
        rows = []
        for number in numbers:
            asked, hidden = self._requests[number], self._hidden.get(number, {})
            shown = -(-asked.width_milli // GPU), asked.cpu_milli, asked.memory_mib
            rows.append([*shown, *(hidden.get(resource, 0) for resource in self._resources)])
        return np.array(rows, np.int64).reshape(len(rows), 3 + len(self._resources))


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
