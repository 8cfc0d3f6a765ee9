"""The room that is left while workers are placed: every dimension of every node, down to shared devices.

A placement works on a `Room`: it asks how many workers of a job's shape each node still holds (`rooms`, kept up to
date as workers are taken and given back) and takes some. Nothing outside the placement ever sees it.

What a worker takes: its CPU and memory from the node; whole devices when it asks for one GPU or more (rounded up),
otherwise its share, in milli and memory, of a single device. A worker of several devices spreads its GPU memory evenly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stretto.core.placement.sharing import Bins, Share, Shares, pack, size, times
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Nodes, Snapshot

_MANY = 2**31
"""Room without a limit: a worker that asks for nothing of a node."""
_REFRESH_ALL = 64


class Shape(NamedTuple):
    """What a worker asks for, and where."""

    pool: int
    devices: int
    """Whole devices; 0 for a share or none."""
    device_mib: int
    """Memory it needs on each of its whole devices."""
    share: Share | None
    cpu_milli: int
    memory_mib: int
    reach: int = -1
    """Row of the room's `reaches`: the nodes it may go to; -1: all."""

    @property
    def milli(self) -> int:
        """Milli-GPU it takes from its node."""
        return self.devices * GPU if self.share is None else self.share.milli


def shape_of(pool: int, width: int, cpu_milli: int, memory_mib: int, gpu_mib: int) -> Shape:
    """The shape of a worker that is `width` milli-GPU wide."""
    if width >= GPU:
        devices = -(-width // GPU)
        return Shape(pool, devices, -(-gpu_mib // devices), None, cpu_milli, memory_mib)
    share = Share(width, gpu_mib) if width or gpu_mib else None
    return Shape(pool, 0, 0, share, cpu_milli, memory_mib)


def shapes_of(view: Snapshot, pool: IntArray) -> tuple[list[Shape], IntArray]:
    """The different shapes among the jobs, and the index of each job's."""
    reach = np.full(len(view), -1, np.int64) if view.reach is None else reaches(view.reach)[1]
    columns = np.column_stack((pool, view.width, view.demand, reach)).astype(np.int64)
    rows = [tuple(row) for row in columns.tolist()]
    # A few shapes among a few dozen jobs, again and again: quicker than np.unique.
    different = sorted(set(rows))
    number = {row: i for i, row in enumerate(different)}
    shapes = [shape_of(*row[:-1])._replace(reach=row[-1]) for row in different]
    return shapes, np.array([number[row] for row in rows], np.int64)


def reaches(reach: BoolArray) -> tuple[BoolArray, IntArray]:
    """The different rows of a [job, node] array, and the index of each job's."""
    packed = np.packbits(reach, axis=1)
    _, first, index = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return reach[first], index.reshape(-1).astype(np.int64)


class Room:
    """What is free on each node. Changed in place by `take` and `give`."""

    def __init__(self, nodes: Nodes, shapes: list[Shape], reach: BoolArray | None = None) -> None:
        """`reach` as in the snapshot that the shapes are of."""
        self.nodes, self.shapes = nodes, shapes
        self._reaches = None if reach is None else reaches(reach)[0]
        self.cpu, self.memory = nodes.cpu_milli.copy(), nodes.memory_mib.copy()
        self.free = np.maximum(nodes.devices, 0)
        """Devices that nobody uses."""
        self._gpus, self._cpus, self._mibs = (1 / np.maximum(x, 1) for x in (self.free * GPU, self.cpu, self.memory))
        self._gpu_left = self.free * GPU
        self.idle = self._gpu_left * self._gpus
        """Share of the node's GPUs that nobody uses, parts of shared ones included."""
        self.shared: dict[int, Bins] = {}
        self._shares: dict[int, Shares] = {}
        self._searched: set[int] = set()
        widest = int(self.free.max(initial=0)) if any(shape.share for shape in shapes) else 0
        self._open_milli = np.zeros((len(self.free), widest), np.int64)
        self._open_mib = np.zeros((len(self.free), widest), np.int64)
        self._allowed: dict[Shape, BoolArray] = {}
        self._rooms: dict[int, IntArray] = {}
        self._seen: dict[int, int] = {}
        self._log: list[int] = []

    def allowed(self, shape: Shape) -> BoolArray:
        """Nodes that are up, of the right pool, with devices large enough."""
        if shape not in self._allowed:
            needs_mib = shape.share.mib if shape.share else shape.device_mib
            up = (self.nodes.pool == shape.pool) & (self.nodes.devices > 0)
            self._allowed[shape] = up & (self.nodes.gpu_memory_mib >= needs_mib)
            if shape.reach >= 0 and self._reaches is not None:
                self._allowed[shape] &= self._reaches[shape.reach]
        return self._allowed[shape]

    def rooms(self, shape: int) -> IntArray:
        """Workers of this shape that each node still holds. Read it, do not keep it."""
        stale = self._log[self._seen.get(shape, 0) :]
        if shape not in self._rooms or len(stale) > _REFRESH_ALL:
            self._rooms[shape] = self._count(self.shapes[shape])
        else:
            for node in set(stale):
                self._rooms[shape][node] = self._count_at(self.shapes[shape], node)
        self._seen[shape] = len(self._log)
        return self._rooms[shape]

    def misfit(self, shape: int, workers: int) -> FloatArray:
        """How badly each node suits so many workers: 0 is best.

        A node fits well when little of its GPUs is free, and badly when these workers would leave it GPUs without
        the CPU or memory to use them: a tenth of its GPUs stranded weighs as much as all of them free.
        """
        asks = self.shapes[shape]
        if not asks.cpu_milli and not asks.memory_mib:
            return self.idle
        cpu = (self.cpu - workers * asks.cpu_milli) * self._cpus
        memory = (self.memory - workers * asks.memory_mib) * self._mibs
        stranded = self.idle - workers * asks.milli * self._gpus - np.minimum(cpu, memory)
        misfit: FloatArray = self.idle + 10 * np.maximum(stranded, 0)
        return misfit

    def take(self, node: int, shape: int, count: int) -> int:
        """Put up to `count` workers on the node; how many it really holds."""
        return self._take(node, shape, min(count, int(self.rooms(shape)[node])))

    def keep(self, node: int, shape: int, count: int) -> int:
        """Leave up to `count` workers on the node where they run: it need not be one they could go to now."""
        return self._take(node, shape, min(count, self._count_at(self.shapes[shape]._replace(reach=-1), node)))

    def _take(self, node: int, shape: int, count: int) -> int:
        asks, rooms = self.shapes[shape], self.rooms(shape)
        if asks.share is not None:
            while count and not self._share(node, asks.share, count):
                count -= 1
        if not count:
            rooms[node] = 0
            return 0
        self._charge(node, asks, count)
        rooms[node] = max(0, int(rooms[node]) - count) if asks.share is None else self._count_at(asks, node)
        self._log.append(node)
        self._seen[shape] = len(self._log)
        return count

    def take_known(self, node: IntArray, shape: IntArray, count: IntArray) -> BoolArray:
        """Put running workers where they are, many at once; False for entries that must be taken one by one.

        These are the shares, and everything on nodes that hold less than they did.
        """
        columns = np.array(
            [(s.devices, s.cpu_milli, s.memory_mib, s.share is not None, s.pool, s.device_mib) for s in self.shapes],
            np.int64,
        ).reshape(-1, 6)
        uses = columns[shape, :3] * count[:, None]
        nodes = len(self.free)
        asked = [np.bincount(node, uses[:, i], nodes).astype(np.int64) for i in range(3)]
        tight = (asked[0] > self.free) | (asked[1] > self.cpu) | (asked[2] > self.memory)
        wrong = (self.nodes.pool[node] != columns[shape, 4]) | (self.nodes.gpu_memory_mib[node] < columns[shape, 5])
        good: BoolArray = ~(tight[node] | (columns[shape, 3] > 0) | wrong | (self.nodes.devices[node] <= 0))
        for free, i in ((self.free, 0), (self.cpu, 1), (self.memory, 2)):
            free -= np.bincount(node[good], uses[good, i], nodes).astype(np.int64)
        self._gpu_left = self.free * GPU
        self.idle = self._gpu_left * self._gpus
        self._rooms.clear()
        return good

    def give(self, node: int, shape: int, count: int) -> None:
        """Take workers away again."""
        asks = self.shapes[shape]
        if asks.share is not None:
            shares = self._shares[node]
            shares[asks.share] -= count
            if not shares[asks.share]:
                del shares[asks.share]
            limit = self._limit(node)
            packed = pack(shares, limit, int(self.nodes.gpu_memory_mib[node]))
            if packed is None:
                # Fewer shares, yet no packing was found in time: those that stay, stay where they are.
                self.shared[node].drop(asks.share, count)
                packed = self.shared[node], True
            self._set(node, limit, packed)
        self._charge(node, asks, -count)
        self._log.append(node)

    def _charge(self, node: int, asks: Shape, count: int) -> None:
        self.free[node] -= asks.devices * count
        self._gpu_left[node] -= asks.milli * count
        self.idle[node] = self._gpu_left[node] * self._gpus[node]
        self.cpu[node] -= asks.cpu_milli * count
        self.memory[node] -= asks.memory_mib * count

    def _count(self, asks: Shape) -> IntArray:
        room = np.where(self.allowed(asks), np.int64(_MANY), np.int64(0))
        if asks.cpu_milli:
            room = np.minimum(room, self.cpu // asks.cpu_milli)
        if asks.memory_mib:
            room = np.minimum(room, self.memory // asks.memory_mib)
        if asks.devices:
            room = np.minimum(room, self.free // asks.devices)
        if asks.share is not None:
            each = _times(asks.share, np.int64(GPU), self.nodes.gpu_memory_mib)
            beside = _times(asks.share, self._open_milli, self._open_mib).sum(axis=1)
            room = np.minimum(room, self.free * each + beside)
        return np.maximum(room, 0)

    def _count_at(self, asks: Shape, node: int) -> int:
        """The same for one node."""
        room = _MANY if self.allowed(asks)[node] else 0
        if asks.cpu_milli:
            room = min(room, int(self.cpu[node]) // asks.cpu_milli)
        if asks.memory_mib:
            room = min(room, int(self.memory[node]) // asks.memory_mib)
        if asks.devices:
            room = min(room, int(self.free[node]) // asks.devices)
        if asks.share is not None:
            bins = self.shared.get(node)
            each = times(asks.share, GPU, int(self.nodes.gpu_memory_mib[node]))
            room = min(room, int(self.free[node]) * each + (bins.room(asks.share) if bins else 0))
        return max(room, 0)

    def _limit(self, node: int) -> int:
        """Devices of the node that may be shared: all but those taken whole."""
        bins = self.shared.get(node)
        return int(self.free[node]) + (len(bins.milli) if bins else 0)

    def _share(self, node: int, share: Share, count: int) -> bool:
        """Add shares to a node; the packing stays the one that `pack` gives for all of them."""
        size_mib, limit = int(self.nodes.gpu_memory_mib[node]), self._limit(node)
        shares = dict(self._shares.get(node, {}))
        own = size(share, size_mib)
        last = node not in self._searched and all(own < size(other, size_mib) for other in shares if other != share)
        shares[share] = shares.get(share, 0) + count
        if last:
            # Best fit decreasing, continued: no smaller share was packed yet.
            bins = self.shared.get(node) or Bins(size_mib)
            if bins.room(share) + (limit - len(bins.milli)) * times(share, GPU, size_mib) >= count:
                bins.put(share, count, limit)
                self._shares[node] = shares
                self._set(node, limit, (bins, False))
                return True
        packed = pack(shares, limit, size_mib)
        if packed is None:
            return False
        self._shares[node] = shares
        self._set(node, limit, packed)
        return True

    def _set(self, node: int, limit: int, packed: tuple[Bins, bool]) -> None:
        bins, searched = packed
        self.free[node] = limit - len(bins.milli)
        self.shared[node] = bins
        (self._searched.add if searched else self._searched.discard)(node)
        self._open_milli[node] = 0
        self._open_mib[node] = 0
        self._open_milli[node, : len(bins.milli)] = bins.milli
        self._open_mib[node, : len(bins.mib)] = bins.mib


def _times(share: Share, milli: IntArray | np.int64, mib: IntArray) -> IntArray:
    by_milli = milli // share.milli if share.milli else np.int64(GPU)
    by_mib = mib // share.mib if share.mib else np.int64(GPU)
    often: IntArray = np.minimum(by_milli, by_mib)
    return often
