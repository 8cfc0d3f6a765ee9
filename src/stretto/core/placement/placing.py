"""What all placements share: keep what runs, give every job the workers it lacks, until nothing more fits.

A placement adds two things: the order in which jobs are served, and a `Choose` that names the nodes for some more
workers of one job. Everything else is promised here, for all of them: no dimension of a node
is exceeded; running workers stay; a shrinking job gives up its smallest pieces; a growing one looks at its own nodes
first; a job ends up with all its workers, with its minimum at least, or with none; and no job goes short of a worker
for which there is room.

The fixed roles of a job (parameter servers, a master) sit on the first of its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from stretto.core.placement.room import Room, shape_of, shapes_of
from stretto.core.placement.sharing import size
from stretto.core.snapshot import BoolArray, IntArray, Snapshot

Picks: TypeAlias = list[tuple[int, int]]
"""Nodes and how many workers each gets."""
Choose: TypeAlias = Callable[["Placing", int, int], Picks]
"""(placing, job, workers) -> nodes for that many more workers of the job, or for as many as there is room."""


class Cells(NamedTuple):
    """The same as a [job, node] array of workers, without its zeros."""

    job: IntArray
    node: IntArray
    workers: IntArray

    @staticmethod
    def of(placed: IntArray) -> Cells:
        job, node = np.nonzero(placed)
        return Cells(job, node, placed[job, node])

    def matrix(self, jobs: int, nodes: int) -> IntArray:
        placed = np.zeros((jobs, nodes), np.int64)
        placed[self.job, self.node] = self.workers
        return placed


class Placing:
    """One placement at work."""

    def __init__(self, view: Snapshot, workers: IntArray, pool: IntArray, before: Cells | None = None) -> None:
        """`before`: where workers run now, if that is not what the snapshot says."""
        self.view, self.pool = view, pool
        self.want: list[int] = np.maximum(workers, 0).tolist()
        self.least: list[int] = np.minimum(view.min_workers, workers).tolist()
        shapes, index = shapes_of(view, pool)
        self.shape: list[int] = index.tolist()
        self.role: list[int] = [-1] * len(view)
        for j in np.flatnonzero(view.fixed_milli).tolist():
            shapes.append(shape_of(int(pool[j]), int(view.fixed_milli[j]), 0, 0, 0))
            self.role[j] = len(shapes) - 1
        self.room = Room(view.nodes, shapes, view.reach)
        self.pieces: list[dict[int, int]] = [{} for _ in self.want]
        """Per job: the nodes it is on, and with how many workers."""
        self.have = [0] * len(view)
        if before is not None or view.placed.shape[1] == len(view.nodes.name):
            self._keep(index, Cells.of(view.placed) if before is None else before)

    def settle(self, order: Iterable[int], choose: Choose) -> None:
        """Serve the jobs in this order, again and again until it changes nothing."""
        short = [j for j in order if self.have[j] < self.want[j]]
        changed = True
        while short and changed:
            changed = False
            for j in short:
                changed |= self.grow(j, choose)
            short = [j for j in short if self.have[j] < self.want[j]]

    def grow(self, j: int, choose: Choose) -> bool:
        """Give one job what it lacks, or at least its minimum, or nothing; whether that changed anything."""
        before = self.have[j]
        lacks = self.least[j] - before
        if (lacks > 1 and int(self.room.rooms(self.shape[j]).sum()) < lacks) or not self._seat_role(j):
            self.release(j)
            return before > 0
        for node in sorted(self.pieces[j], key=lambda node: (-self.pieces[j][node], node)):
            self.take(j, node, self.want[j] - self.have[j])
        while self.have[j] < self.want[j]:
            picks = choose(self, j, self.want[j] - self.have[j])
            if not picks:
                break
            for node, count in picks:
                self.take(j, node, count)
        if self.have[j] < self.least[j]:
            self.release(j)
            return before > 0
        return self.have[j] > before

    def rooms(self, j: int) -> IntArray:
        """How many more workers of the job each node holds. Read it, do not change it."""
        rooms = self.room.rooms(self.shape[j])
        if self.role[j] >= 0 and self.pieces[j]:
            rooms = rooms.copy()
            rooms[: min(self.pieces[j])] = 0
        return rooms

    def take(self, j: int, node: int, count: int) -> int:
        """Put workers of the job on the node, as many as fit."""
        got = self.room.take(node, self.shape[j], count) if count > 0 else 0
        if got:
            self.pieces[j][node] = self.pieces[j].get(node, 0) + got
            self.have[j] += got
        return got

    def release(self, j: int) -> None:
        """Take all workers of the job away."""
        if not self.pieces[j]:
            return
        if self.role[j] >= 0:
            self.room.give(min(self.pieces[j]), self.role[j], 1)
        for node, count in self.pieces[j].items():
            self.room.give(node, self.shape[j], count)
        self.pieces[j] = {}
        self.have[j] = 0

    def cells(self) -> Cells:
        """Who is where, in order of job."""
        rows = [(j, node, count) for j, nodes in enumerate(self.pieces) for node, count in sorted(nodes.items())]
        table = np.array(rows, np.int64).reshape(-1, 3)
        return Cells(table[:, 0], table[:, 1], table[:, 2])

    def matrix(self) -> IntArray:
        """[job, node] workers."""
        return self.cells().matrix(len(self.pieces), len(self.view.nodes.name))

    # What runs stays.

    def _keep(self, shape: IntArray, before: Cells) -> None:
        rows, nodes, counts = before
        up = self.view.nodes.devices[nodes] > 0
        right = self.view.nodes.pool[nodes] == np.array([s.pool for s in self.room.shapes], np.int64)[shape[rows]]
        wanted = np.array(self.want, np.int64)
        stays = up & right & (wanted[rows] > 0) & (counts > 0)
        rows, nodes, counts = rows[stays], nodes[stays], counts[stays]
        counts = _shrink(rows, nodes, counts, wanted, np.array(self.role, np.int64))
        known = self.room.take_known(nodes, shape[rows], counts)
        for j, node, count in _triples(rows, nodes, counts, known & (counts > 0)):
            self.pieces[j][node] = count
            self.have[j] += count
        one_by_one = _triples(rows, nodes, counts, ~known & (counts > 0))
        for j, node, count in sorted(one_by_one, key=self._large_first):
            got = self.room.keep(node, self.shape[j], count)
            if got:
                self.pieces[j][node] = got
                self.have[j] += got
        for j, role in enumerate(self.role):
            if role >= 0 and self.pieces[j] and not self.room.take(min(self.pieces[j]), role, 1):
                self._release_workers(j)

    def _large_first(self, cell: tuple[int, int, int]) -> tuple[int, int, int]:
        j, node, _ = cell
        share = self.room.shapes[self.shape[j]].share
        return (-size(share, int(self.view.nodes.gpu_memory_mib[node])) if share else 0, j, node)

    def _release_workers(self, j: int) -> None:
        role, self.role[j] = self.role[j], -1
        self.release(j)
        self.role[j] = role

    # Fixed roles.

    def _seat_role(self, j: int) -> bool:
        """Find a first node for a job with fixed roles: they, a worker there, and its minimum from there on."""
        role = self.role[j]
        if role < 0 or self.pieces[j]:
            return True
        for node in np.flatnonzero(self.room.rooms(role) * self.room.rooms(self.shape[j])).tolist():
            if self.room.take(node, role, 1):
                rooms = self.room.rooms(self.shape[j])
                if rooms[node] and rooms[node:].sum() >= self.least[j] and self.take(j, node, self.want[j]):
                    return True
                self.room.give(node, role, 1)
        return False


def one_by_one(view: Snapshot, workers: IntArray, pool: IntArray, choose: Choose) -> IntArray:
    """[job, node] workers, the jobs served in the order in which they came."""
    placing = Placing(view, workers, pool)
    order = np.argsort(view.job, kind="stable")
    placing.settle(_asked(order, workers), choose)
    return placing.matrix()


def by_size(view: Snapshot, workers: IntArray, pool: IntArray) -> list[int]:
    """Jobs with the widest workers first, then those that ask for most of a node, then with the most workers."""
    demand = view.demand
    keys = (view.job, -workers, pool, -demand[:, 0], -demand[:, 1], -demand[:, 2], -view.width)
    return _asked(np.lexsort(keys), workers)


def _asked(order: IntArray, workers: IntArray) -> list[int]:
    asked: list[int] = order[workers[order] > 0].tolist()
    return asked


def _shrink(rows: IntArray, nodes: IntArray, counts: IntArray, wanted: IntArray, role: IntArray) -> IntArray:
    """Counts after every job with too many workers gave up its smallest pieces, but never the seat of its roles."""
    surplus = np.bincount(rows, counts, len(wanted)).astype(np.int64) - wanted
    if not (surplus > 0).any():
        return counts
    counts = counts.copy()
    left = surplus.tolist()
    seat = np.zeros(len(rows), np.bool_)
    seat[np.unique(rows, return_index=True)[1]] = True
    seat &= role[rows] >= 0
    touched = np.flatnonzero(surplus[rows] > 0)
    for i in touched[np.lexsort((-nodes[touched], counts[touched], seat[touched]))].tolist():
        j = int(rows[i])
        gone = min(left[j], int(counts[i]))
        counts[i] -= gone
        left[j] -= gone
    return counts


def _triples(rows: IntArray, nodes: IntArray, counts: IntArray, chosen: BoolArray) -> list[tuple[int, int, int]]:
    return list(zip(rows[chosen].tolist(), nodes[chosen].tolist(), counts[chosen].tolist(), strict=True))
