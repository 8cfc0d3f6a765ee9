"""A cluster's nodes as snapshots show them: what our workers may have of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stretto.core.snapshot import IntArray, Nodes
from stretto.kubernetes import capacity
from stretto.kubernetes.model import CPU, MEMORY, POD_COUNT, Amounts


class Landscape(msgspec.Struct, frozen=True):
    pools: tuple[str, ...]
    nodes: Nodes
    room: capacity.Room
    gpu_resource: str

    @property
    def drained(self) -> Mapping[str, float]:
        """None: who may not go to a node that is cordoned is a matter of its reach, and `kubectl drain` ends pods."""
        return {}

    def columns(self) -> Nodes:
        return self.nodes

    def hidden(self, needs: Amounts) -> Amounts:
        """What is asked for and no snapshot shows. Of pods a node holds as many as devices, if one wants devices."""
        shown = {CPU, MEMORY, self.gpu_resource}
        if needs.get(self.gpu_resource):
            shown.add(POD_COUNT)
        return {resource: amount for resource, amount in needs.items() if resource not in shown}

    def there(self, resource: str) -> IntArray:
        return self.room.column(resource)


def landscape(
    room: capacity.Room, gpu_resource: str, pools: tuple[str, ...], types: Sequence[str], gpu_mib: Sequence[int]
) -> Landscape:
    nodes = Nodes(
        name=tuple(room.nodes),
        pool=np.array([pools.index(kind) for kind in types], np.int64),
        devices=np.minimum(room.column(gpu_resource), room.pods),
        cpu_milli=room.cpu_milli,
        memory_mib=room.memory_mib,
        gpu_memory_mib=np.array(gpu_mib, np.int64),
    )
    return Landscape(pools, nodes, room, gpu_resource)
