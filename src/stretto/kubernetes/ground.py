"""The floor of a cluster: what of its nodes is free at this moment, and who waits for what is not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from stretto.jobs.model import Seat
from stretto.kubernetes import capacity
from stretto.kubernetes.model import Amounts
from stretto.server import reconcile

_FOREIGN = 2**62
"""Stands for pods of others where job numbers are compared: nobody's last worker leaves for them before its
replacement has come."""


class Ground:
    """What is left beside all our workers, seen or only launched, of the nodes on which something is to change."""

    def __init__(
        self,
        room: capacity.Room,
        situations: Sequence[reconcile.Situation],
        asks: Callable[[int], Amounts],
        held: Mapping[str, Amounts],
        others: Iterable[tuple[str, Amounts]],
    ) -> None:
        """`asks`: what a worker to come takes, by job. `held`: what those take whose pods are known, by launch.
        `others`: nodes, and what pods of ours hold there that belong to none of these jobs."""
        unsettled = [s for s in situations if not s.is_settled]
        column = {name: i for i, name in enumerate(room.resources)}
        needs = {s.job: asks(s.job) for s in unsettled}
        self._asks = {job: [(column[r], n) for r, n in some.items() if r in column] for job, some in needs.items()}
        self._missing = {job: any(n and r not in column for r, n in some.items()) for job, some in needs.items()}
        concerned = {seat.node for s in unsettled for seat in (*s.target, *(worker.seat for worker in s.workers))}
        self._row = {name: row for row, name in enumerate(room.nodes) if name in concerned}
        self._claimed = Counter(claim.node for claim in room.claims if claim.how != "fits")
        ours = (
            (w.seat.node, held[w.launch] if w.launch in held else asks(s.job))
            for s in situations
            for w in s.workers
            if w.seat.node in concerned
        )
        self._left = self._beside(room, chain(others, ours))
        self._wanted: dict[str, set[int]] = {}
        for s in unsettled:
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
