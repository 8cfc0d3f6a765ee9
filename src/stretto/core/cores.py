"""Jobs that want no GPU, beside jobs that do: two questions, GPUs first, then cores with what is left.

To the second question a device is a core. So the same policies rule over cores: jobs share them, grow, shrink and
wait, and none takes all of a machine because it counts as nothing. A worker that asks for no CPU counts as one core.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from stretto.core import services
from stretto.core.snapshot import GPU, BoolArray, IntArray, Nodes, Snapshot

CPU_POOL = "cpu"
"""The device type of nodes that have none."""


class Question(NamedTuple):
    """The jobs without GPUs."""

    view: Snapshot
    """For the policy: widths and capacity are cores."""
    places: Snapshot
    """For the placement: workers take CPU and memory of their nodes, and no devices."""


def without_gpus(view: Snapshot) -> BoolArray:
    """Which jobs take no part of any GPU; nobody where nodes are not told apart."""
    if view.placed.shape[1] != len(view.nodes.name):
        return np.zeros(len(view), np.bool_)
    plain: BoolArray = (view.width == 0) & (view.demand[:, 2] == 0)
    return plain


def question(view: Snapshot, plain: BoolArray, placed: IntArray) -> Question:
    """On the cores that `placed` ([job, node] workers of the others) leaves."""
    nodes = _beside(view, placed)
    some = services.only(view, plain)
    places = msgspec.structs.replace(
        some,
        pools=(CPU_POOL,),
        capacity=np.array([int(nodes.cpu_milli.sum())], np.int64),
        nodes=nodes,
        rates=view.rates[[pool_of(view)]],
        spread_rates=None,
        pool=np.where(some.workers > 0, 0, -1),
    )
    width = np.where(some.demand[:, 0] > 0, some.demand[:, 0], GPU)
    return Question(msgspec.structs.replace(places, width=width), places)


def pool_of(view: Snapshot) -> int:
    """The pool that such jobs are said to run on."""
    return view.pools.index(CPU_POOL) if CPU_POOL in view.pools else 0


def _beside(view: Snapshot, placed: IntArray) -> Nodes:
    """The nodes with what these workers leave; a node with any CPU is one that has devices."""
    taken = placed.T @ view.demand[:, :2]
    cpu = np.maximum(view.nodes.cpu_milli - taken[:, 0], 0)
    return msgspec.structs.replace(
        view.nodes,
        pool=np.zeros(len(view.nodes.name), np.int64),
        devices=np.where(cpu > 0, np.maximum(cpu // GPU, 1), 0),
        cpu_milli=cpu,
        memory_mib=np.maximum(view.nodes.memory_mib - taken[:, 1], 0),
    )
