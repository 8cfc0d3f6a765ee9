"""A cluster's nodes as snapshots show them: some of the nodes, and what a device is there.

To jobs that want GPUs a device is a GPU; to those that want none, a slice of CPU, as large as all their requests are
multiples of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, BoolArray, IntArray, Nodes
from stretto.kubernetes import capacity
from stretto.kubernetes.cluster import CPU_POOL
from stretto.kubernetes.model import CPU, MEMORY, POD_COUNT, Amounts
from stretto.server import deciding
from stretto.server.book import Active

_OTHERWISE = frozenset({CPU, MEMORY, POD_COUNT})
"""What snapshots show besides devices."""


class There(msgspec.Struct, frozen=True):
    """What our workers may have of every node."""

    room: capacity.Room
    gpu_resource: str
    pools: tuple[str, ...]
    types: Sequence[str]
    gpu_mib: Sequence[int]

    def with_gpus(self) -> Landscape:
        chosen = np.array([kind != CPU_POOL for kind in self.types], np.bool_)
        devices = np.minimum(self.room.column(self.gpu_resource), self.room.pods)
        pool = np.array([self.pools.index(kind) for kind in self.types], np.int64)
        return self._landscape(chosen, pool, devices, GPU)

    def with_cores(self, slice_milli: int) -> Landscape:
        chosen = np.ones(len(self.types), np.bool_)
        devices = np.minimum(self.room.cpu_milli // slice_milli, self.room.pods)
        pool = np.full(len(self.types), self.pools.index(CPU_POOL), np.int64)
        return self._landscape(chosen, pool, devices, slice_milli)

    def after(self, verdicts: Mapping[int, deciding.Verdict], needs: Mapping[int, Amounts]) -> There:
        """What is left when these have what they were given."""
        at = {name: i for i, name in enumerate(self.room.nodes)}
        left = self.room.room.copy()
        for number, verdict in verdicts.items():
            np.subtract.at(left, [at[seat.node] for seat in verdict.seats], self.room.vector(needs[number]))
        return msgspec.structs.replace(self, room=msgspec.structs.replace(self.room, room=np.maximum(left, 0)))

    def _landscape(self, chosen: BoolArray, pool: IntArray, devices: IntArray, unit: int) -> Landscape:
        nodes = Nodes(
            name=tuple(name for name, is_in in zip(self.room.nodes, chosen.tolist(), strict=True) if is_in),
            pool=pool[chosen],
            devices=devices[chosen],
            cpu_milli=self.room.cpu_milli[chosen],
            memory_mib=self.room.memory_mib[chosen],
            gpu_memory_mib=np.array(self.gpu_mib, np.int64)[chosen],
        )
        return Landscape(self.pools, nodes, self.room, _OTHERWISE | {self.gpu_resource}, chosen, unit)


class Landscape(msgspec.Struct, frozen=True):
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


def slice_milli(jobs: Sequence[Active]) -> int:
    """As much CPU as all these jobs ask for multiples of; at least a tenth of a core."""
    asked = [active.request.cpu_milli for active in jobs if active.request.cpu_milli]
    return max(math.gcd(*asked), 100) if asked else GPU
