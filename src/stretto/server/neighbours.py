"""Who disturbs whom: steps that were timed while a neighbour came or went tell nothing of a job's own size.

Neighbours are the workers of other jobs that share devices with a job, or a node with fewer cores than slots. One that
starts takes time from those who train until it takes part itself; one that ends gives some back. Afterwards the job may
be faster or slower than before, at every size: that is for its next windows to show (`curve.take_in`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from stretto.backends.protocol import Node
from stretto.core.snapshot import GPU
from stretto.jobs.model import Seat, Worker

_REMEMBERED_S = 600.0
"""After a change: windows of slow steps last for minutes."""
_MOST_PER_NODE = 100
_LONGEST_START_S = 60.0
"""A worker that does not take part by then does something else."""


@dataclass
class _Change:
    job: int
    devices: frozenset[int]
    since_s: float
    until_s: float


class Neighbours:
    def __init__(self, nodes: Callable[[], Iterable[Node]], clock: Callable[[], float]) -> None:
        self._nodes, self._clock = nodes, clock
        self._changes: defaultdict[str, deque[_Change]] = defaultdict(lambda: deque(maxlen=_MOST_PER_NODE))
        """By node, the oldest first."""
        self._starting: dict[tuple[int, str], _Change] = {}
        """By job and worker."""

    def launched(self, job: int, worker: str, seat: Seat) -> None:
        self._starting[job, worker] = self._note(job, seat, _LONGEST_START_S)

    def takes_part(self, job: int, workers: Collection[str]) -> None:
        """These have started, if they had not before."""
        for name in workers:
            self._end_of_start(job, name)

    def exited(self, job: int, worker: Worker) -> None:
        self._end_of_start(job, worker.name)
        self._note(job, worker.seat, 0.0)

    def disturbed(self, job: int, seats: Collection[Seat], since_s: float, until_s: float) -> bool:
        """Whether somebody came or went beside these workers of a job in that time."""
        return any(
            self._beside(job, node, [seat for seat in seats if seat.node == node], since_s, until_s)
            for node in {seat.node for seat in seats}
        )

    def _beside(self, job: int, node: str, seats: Iterable[Seat], since_s: float, until_s: float) -> bool:
        others = [
            change
            for change in self._changes.get(node, ())
            if change.job != job and change.since_s <= until_s and change.until_s >= since_s
        ]
        own = {device for seat in seats for device in seat.devices}
        return any(own & change.devices for change in others) or (bool(others) and self._is_crowded(node))

    def _is_crowded(self, name: str) -> bool:
        return any(node.name == name and node.cpu_milli < node.devices * GPU for node in self._nodes())

    def _note(self, job: int, seat: Seat, lasts_s: float) -> _Change:
        now_s, changes = self._clock(), self._changes[seat.node]
        while changes and changes[0].until_s < now_s - _REMEMBERED_S:
            changes.popleft()
        change = _Change(job, frozenset(seat.devices), now_s, now_s + lasts_s)
        changes.append(change)
        return change

    def _end_of_start(self, job: int, worker: str) -> None:
        change = self._starting.pop((job, worker), None)
        if change is not None:
            change.until_s = min(self._clock(), change.until_s)
