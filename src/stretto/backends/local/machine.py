"""The nodes of one machine: its GPUs, or slots of its processor, or several virtual nodes made of either.

Which GPUs are ours `stretto.backends.local.gpus` says; a machine without has CPU slots, and so has one that is told to.
A slot is an equal share of the cores: a whole core or several where there are enough, else a part of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from stretto.backends.local.gpus import INSTEAD, VISIBLE, Gpu, find_gpus
from stretto.backends.protocol import Launch, Node
from stretto.errors import UsageError

CPU = "cpu"

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class Machine(NamedTuple):
    """The nodes, and what their devices really are."""

    nodes: tuple[Node, ...]
    uuids: dict[str, tuple[str, ...]]
    """Node → its GPUs; a node without is one of slots, or one whose GPUs go by number."""
    cores: tuple[int, ...]
    """Those that we may use."""
    why: str = ""
    """Why the slots are the processor's though there may be GPUs."""

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Self:
        """For nodes that are made up: GPUs, if they have any, go by their numbers."""
        return cls(tuple(nodes), {}, tuple(sorted(os.sched_getaffinity(0))))

    def __str__(self) -> str:
        """`2 h200`, `6 CPU slots (--cpu)`, `node0: 4 CPU slots, node1: 4 CPU slots`."""
        named = {node.name: "CPU slots" if node.pool == CPU else node.pool for node in self.nodes}
        counted = [(node.name, f"{node.devices} {named[node.name]}") for node in self.nodes]
        text = counted[0][1] if len(counted) == 1 else ", ".join(f"{name}: {what}" for name, what in counted)
        return f"{text} ({self.why})" if self.why else text

    def visible_devices(self, node: str, devices: Sequence[int]) -> str:
        """CUDA_VISIBLE_DEVICES for a seat: GPUs by their UUIDs; nothing on a node of slots."""
        if self._node(node).pool == CPU:
            return ""
        uuids = self.uuids.get(node)
        return ",".join(str(device) if uuids is None else uuids[device] for device in devices)

    def variables(self, launch: Launch) -> dict[str, str]:
        """What the worker's environment says of its devices, and of threads unless the job says so itself."""
        threads = launch.env.get("OMP_NUM_THREADS") or str(max(1, self.cpu_milli(launch) // 1000))
        return {
            **{name: threads for name in _THREADS if name not in launch.env},
            "CUDA_VISIBLE_DEVICES": self.visible_devices(launch.node, launch.devices),
        }

    def cpu_milli(self, launch: Launch) -> int:
        """What a worker may count on: what was asked for, else its devices' share of the node."""
        if launch.cpu_milli:
            return launch.cpu_milli
        node = self._node(launch.node)
        return node.cpu_milli * max(1, len(launch.devices)) // max(1, node.devices)

    def quota_milli(self, launch: Launch) -> int:
        """What a worker is held to: what was asked for; on a node of slots that are parts of a core, its slots' part.
        0: nothing, there is a core for everybody."""
        if launch.cpu_milli:
            return launch.cpu_milli
        parts = len(self.cores) < sum(node.devices for node in self.nodes)
        return self.cpu_milli(launch) if parts and launch.devices and self._node(launch.node).pool == CPU else 0

    def affinity(self, launch: Launch) -> tuple[int, ...]:
        """The cores of a worker's slots; none where a slot is less than a core, or on GPU nodes."""
        slots = sum(node.devices for node in self.nodes)
        if any(node.pool != CPU for node in self.nodes) or not launch.devices or len(self.cores) < slots:
            return ()
        first = sum(node.devices for node in self.nodes[: self.nodes.index(self._node(launch.node))])
        each = len(self.cores) // slots
        starts = [(first + device) * each for device in launch.devices]
        return tuple(core for start in starts for core in self.cores[start : start + each])

    def _node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)


def discover(
    shape: str = "", *, cpu: bool = False, gpus: Sequence[Gpu] | None = None, cores: Sequence[int] = ()
) -> Machine:
    """This machine. `shape` is `NODESxDEVICES` for virtual nodes (`2x4`), or a number of devices for one node. With
    `cpu` nobody asks for GPUs; else they are those that CUDA_VISIBLE_DEVICES shows."""
    count, devices = parse_shape(shape)
    usable = tuple(cores) or tuple(sorted(os.sched_getaffinity(0)))
    found, why = ([], "--cpu") if cpu else _gpus(gpus)
    if not found:
        return _slots(count, devices or len(usable), usable, why)
    return _with_gpus(count, devices, found, usable)


def _gpus(given: Sequence[Gpu] | None) -> tuple[list[Gpu], str]:
    """With why there may be none though the machine has some."""
    shown = os.environ.get(VISIBLE)
    if given is not None or shown is None:
        return list(find_gpus() if given is None else given), ""
    return find_gpus(shown), f"{VISIBLE}={shown} shows no GPUs"


def parse_shape(shape: str) -> tuple[int, int]:
    """Nodes and devices of each; 0 devices: as many as there are."""
    if not shape:
        return 1, 0
    found = re.fullmatch(r"(?:(\d{1,4})x)?(\d{1,4})", shape)
    if found is None or not int(found[1] or 1) or not int(found[2]):
        raise UsageError(f"{shape!r} is not a number of nodes", hint="give nodes x devices of each: 2x4")
    return int(found[1] or 1), int(found[2])


def memory_mib(meminfo: str = "/proc/meminfo") -> int:
    with open(meminfo) as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) // 1024


def _slots(count: int, devices: int, cores: tuple[int, ...], why: str) -> Machine:
    slot_milli = max(1, len(cores) * 1000 // (count * devices))
    nodes = tuple(
        Node(
            name=name, pool=CPU, devices=devices, cpu_milli=slot_milli * devices, memory_mib=memory_mib() // count
        )
        for name in _names(count)
    )  # fmt: skip
    return Machine(nodes, {}, cores, why)


def _with_gpus(count: int, devices: int, gpus: Sequence[Gpu], cores: tuple[int, ...]) -> Machine:
    """Nodes have devices of one kind: a machine with several kinds is several nodes."""
    by_kind: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        by_kind.setdefault(gpu.kind, []).append(gpu)
    if not devices:
        shares = list(by_kind.values())
    else:
        whole = [kind[i : i + devices] for kind in by_kind.values() for i in range(0, len(kind), devices)]
        shares = [share for share in whole if len(share) == devices][:count]
        if len(shares) < count:
            there = ", ".join(f"{len(kind)} {name}" for name, kind in by_kind.items())
            raise UsageError(
                f"{count} nodes of {devices} GPUs cannot be made of {there}",
                hint=f"ask for fewer, or leave --nodes out; {INSTEAD}",
            )
    total = sum(len(share) for share in shares)
    nodes, uuids = [], {}
    for name, share in zip(_names(len(shares)), shares, strict=True):
        uuids[name] = tuple(gpu.uuid for gpu in share)
        nodes.append(
            Node(
                name=name,
                pool=share[0].kind,
                devices=len(share),
                cpu_milli=len(cores) * 1000 * len(share) // total,
                memory_mib=memory_mib() * len(share) // total,
                gpu_memory_mib=min(gpu.memory_mib for gpu in share),
            )
        )
    return Machine(tuple(nodes), uuids, cores)


def _names(count: int) -> list[str]:
    return ["local"] if count == 1 else [f"node{number}" for number in range(count)]
