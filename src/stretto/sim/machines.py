"""The nodes of a run: which are up, what they hold, and what is to befall them."""

from __future__ import annotations

import math
from collections import deque

import msgspec

from stretto.core.snapshot import Nodes
from stretto.sim import cluster as clusters
from stretto.sim.world import Failure


class Machines:
    """A node that is down has no devices."""

    def __init__(self, pools: tuple[str, ...], nodes: Nodes, failures: tuple[Failure, ...]) -> None:
        self.pools, self.nodes = pools, nodes
        self.capacity = clusters.capacity(pools, nodes)
        self._whole = nodes.devices
        self._coming = deque(sorted(failures, key=lambda failure: (failure.at_s, failure.node)))

    @property
    def next_s(self) -> float:
        """When a node next goes down or comes back."""
        return self._coming[0].at_s if self._coming else math.inf

    def advance(self, now_s: float) -> list[Failure]:
        """Let happen what is due; these."""
        due = []
        while self._coming and self._coming[0].at_s <= now_s:
            due.append(self._coming.popleft())
        if due:
            devices = self.nodes.devices.copy()
            for failure in due:
                devices[failure.node] = self._whole[failure.node] if failure.up else 0
            self.nodes = msgspec.structs.replace(self.nodes, devices=devices)
            self.capacity = clusters.capacity(self.pools, self.nodes)
        return due
