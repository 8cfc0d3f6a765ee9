"""Make room for a wide worker by moving a few narrow ones off a node. Used by `fewest_moves`."""

from __future__ import annotations

import numpy as np

from stretto.core.placement.pack import best_fit, tightest
from stretto.core.placement.placing import Placing

_FEW = 64
"""With more workers than this to find room for, packing anew is the better way."""
_TRIES = 16
"""Nodes that are looked at to make room for one worker."""


def make_room(placing: Placing, order: list[int]) -> None:
    """Serve every job that goes short by clearing nodes a little, until that helps nobody any more."""
    lacks = sum(want - have for want, have in zip(placing.want, placing.have, strict=True))
    if lacks > _FEW:
        return
    clearing = _Clearing(placing)
    helped = True
    while helped:
        helped = False
        hopeless: dict[int, int] = {}
        for j in order:
            shape, need = placing.shape[j], max(placing.least[j] - placing.have[j], 1)
            if placing.have[j] == placing.want[j] or placing.role[j] >= 0 or need >= hopeless.get(shape, need + 1):
                continue
            if clearing.serve(j):
                helped = True
            else:
                hopeless[shape] = need


class _Clearing:
    """Moves worker by worker, written down so that an attempt can be undone."""

    def __init__(self, placing: Placing) -> None:
        self.placing = placing
        self.tenants: list[set[int]] = [set() for _ in placing.view.nodes.name]
        for j, pieces in enumerate(placing.pieces):
            for node in pieces:
                self.tenants[node].add(j)
        self.journal: list[tuple[int, int, int]] = []

    def serve(self, j: int) -> bool:
        """Find the job at least one more worker, and no less than its minimum; or leave everything as it was."""
        placing, mark = self.placing, len(self.journal)
        had = placing.have[j]
        while placing.have[j] < placing.want[j] and self._one_more(j):
            pass
        if placing.have[j] >= max(placing.least[j], had + 1):
            return True
        self._undo(mark)
        return False

    def _one_more(self, j: int) -> bool:
        shape, room = self.placing.shape[j], self.placing.room
        picks = tightest(self.placing, j, 1)
        if picks:
            return self._put(j, picks[0][0])
        asks = room.shapes[shape]
        candidates = np.flatnonzero(room.allowed(asks))
        if int(room.free[candidates].sum()) < asks.devices:
            return False
        roomy = candidates[np.argsort(-room.free[candidates], kind="stable")][:_TRIES]
        return any(self._clear(j, node) for node in roomy.tolist())

    def _clear(self, j: int, node: int) -> bool:
        """Move narrower workers off the node until one of the job fits there."""
        width, mark = self.placing.view.width, len(self.journal)
        narrow = [i for i in self.tenants[node] if width[i] < width[j] and self._may_move(i, node)]
        for i in sorted(narrow, key=lambda i: (width[i], i)):
            for _ in range(self.placing.pieces[i][node]):
                if not self._move(i, node):
                    break
                if self._put(j, node):
                    return True
        self._undo(mark)
        return False

    def _may_move(self, i: int, node: int) -> bool:
        """Whoever could not come back stays, for an attempt may be undone."""
        room = self.placing.room
        return self.placing.role[i] < 0 and bool(room.allowed(room.shapes[self.placing.shape[i]])[node])

    def _move(self, i: int, node: int) -> bool:
        rooms = self.placing.room.rooms(self.placing.shape[i]).copy()
        rooms[node] = 0
        picks = best_fit(self.placing, i, rooms, 1)
        if not picks:
            return False
        self._drop(i, node)
        if self._put(i, picks[0][0]):
            return True
        self._put(i, node)
        return False

    def _put(self, i: int, node: int) -> bool:
        if not self.placing.take(i, node, 1):
            return False
        self.tenants[node].add(i)
        self.journal.append((i, node, 1))
        return True

    def _drop(self, i: int, node: int) -> None:
        placing = self.placing
        placing.room.give(node, placing.shape[i], 1)
        placing.have[i] -= 1
        placing.pieces[i][node] -= 1
        if not placing.pieces[i][node]:
            del placing.pieces[i][node]
            self.tenants[node].discard(i)
        self.journal.append((i, node, -1))

    def _undo(self, mark: int) -> None:
        while len(self.journal) > mark:
            i, node, change = self.journal.pop()
            if change > 0:
                self._drop(i, node)
            else:
                self._put(i, node)
            self.journal.pop()
