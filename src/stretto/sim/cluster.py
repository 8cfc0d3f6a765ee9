"""The simulated machines: `16x8` (nodes x GPUs), or a file for heterogeneous clusters.

The file is CSV with a header: `nodes,gpus,type` and optionally `cpu_milli,memory_mib,gpu_memory_mib`
per node. One line per kind of node.
"""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path
from typing import TypeAlias

import numpy as np

from stretto.core.snapshot import GPU, IntArray, Nodes
from stretto.errors import TraceError, UsageError
from stretto.sim import files

_PLENTY = 2**40
_MOST_NODES = 100_000
_MOST_GPUS = 10_000
"""A typing error should say so, not fill the memory."""

Kind: TypeAlias = tuple[int, int, str, int, int, int]
"""Nodes, GPUs on each, device type, CPU milli, memory MiB, memory of one GPU in MiB."""


def parse(text: str) -> tuple[tuple[str, ...], Nodes]:
    """Pools and nodes of `NODESxGPUS` or of a cluster file."""
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if match:
        nodes, gpus = int(match[1]), int(match[2])
        if nodes < 1 or gpus < 1:
            raise UsageError(f"cluster {text!r} has no GPUs", hint="give NODESxGPUS, for example 16x8")
        return uniform(nodes, gpus)
    path = Path(text)
    hint = "give NODESxGPUS, for example 16x8, or a CSV file with nodes,gpus,type"
    if path == Path() or not os.path.exists(path):
        raise UsageError(f"cluster {text!r} is neither NODESxGPUS nor a file", hint=hint)
    files.check(path, "cluster", hint)
    return read(path)


def uniform(nodes: int, gpus: int, pool: str = "gpu") -> tuple[tuple[str, ...], Nodes]:
    """So many equal nodes of one device type."""
    return _build([(nodes, gpus, pool, _PLENTY, _PLENTY, _PLENTY)])


def mixed(counts: dict[str, int], gpus: int = 1) -> tuple[tuple[str, ...], Nodes]:
    """Heterogeneous nodes: device type → number of GPUs, `gpus` on each node."""
    return _build([(count // gpus, gpus, kind, _PLENTY, _PLENTY, _PLENTY) for kind, count in counts.items()])


def read(path: Path) -> tuple[tuple[str, ...], Nodes]:
    """A cluster file."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"nodes", "gpus", "type"} - set(reader.fieldnames or ())
        if missing:
            raise TraceError(
                f"cluster {path.name!r}: column {', '.join(sorted(missing))} is missing",
                hint="the header must have nodes,gpus,type[,cpu_milli,memory_mib,gpu_memory_mib]",
            )
        kinds: list[Kind] = []
        for row, line in enumerate(reader, 2):
            try:
                kinds.append(_kind(line))
            except (ValueError, TypeError, AttributeError):
                raise TraceError(
                    f"cluster {path.name!r}, row {row}: {dict(line)} is not a kind of node",
                    hint="nodes, gpus, cpu_milli, memory_mib and gpu_memory_mib must be whole numbers",
                ) from None
    if not kinds or sum(k[0] * k[1] for k in kinds) < 1 or min(min(k[0], k[1]) for k in kinds) < 0:
        raise TraceError(f"cluster {path.name!r} has no GPUs", hint="give at least one line with GPUs")
    return _build(kinds)


def capacity(pools: tuple[str, ...], nodes: Nodes) -> IntArray:
    """Milli-GPU per pool."""
    return np.bincount(nodes.pool, weights=nodes.devices * GPU, minlength=len(pools)).astype(np.int64)


def _kind(line: dict[str, str]) -> Kind:
    cpu, memory, gpu_memory = (int(line.get(c) or _PLENTY) for c in ("cpu_milli", "memory_mib", "gpu_memory_mib"))
    return int(line["nodes"]), int(line["gpus"]), line["type"].strip() or "gpu", cpu, memory, gpu_memory


def _build(kinds: list[Kind]) -> tuple[tuple[str, ...], Nodes]:
    if sum(kind[0] for kind in kinds) > _MOST_NODES or max(kind[1] for kind in kinds) > _MOST_GPUS:
        raise UsageError(
            "the cluster is larger than any that exists",
            hint=f"up to {_MOST_NODES} nodes with up to {_MOST_GPUS} GPUs each can be simulated",
        )
    pools = tuple(dict.fromkeys(kind[2] for kind in kinds))
    spread = [kind for kind in kinds for _ in range(kind[0])]
    columns = [np.array([kind[i] for kind in spread], np.int64) for i in (1, 3, 4, 5)]
    return pools, Nodes(
        name=tuple(f"node-{i}" for i in range(len(spread))),
        pool=np.array([pools.index(kind[2]) for kind in spread], np.int64),
        devices=columns[0],
        cpu_milli=columns[1],
        memory_mib=columns[2],
        gpu_memory_mib=columns[3],
    )
