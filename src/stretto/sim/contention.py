"""Jobs that slow each other down: what a neighbour takes of a machine's memory bandwidth, caches and network.

A job runs at its own speed / (1 + contention × share), where `share` is what others hold of the machine it shares with
them: of the GPUs of its node, and, where its workers have less than a whole GPU each, of the GPUs on which such workers
sit (as few as hold them all). Over several nodes the slowest decides, because workers wait for one another.
"""

from __future__ import annotations

import numpy as np

from stretto.core.snapshot import GPU, FloatArray, IntArray


def speeds(placed: IntArray, width: IntArray, devices: IntArray, contention: float) -> FloatArray:
    """The part of its own speed at which each job runs, where `placed` of its workers are on each node."""
    held = placed * width[:, None]
    share = _others(held, devices * GPU)
    small = (width < GPU)[:, None]
    in_parts = np.where(small, held, 0)
    shared = -(-in_parts.sum(axis=0) // GPU) * GPU
    share = np.maximum(share, np.where(small, _others(in_parts, shared), 0.0))
    worst: FloatArray = np.where(placed > 0, share, 0.0).max(axis=1, initial=0.0)
    return 1 / (1 + contention * worst)


def _others(held: IntArray, whole: IntArray) -> FloatArray:
    """[job, node] what the others hold of the whole."""
    share: FloatArray = (held.sum(axis=0) - held) / np.maximum(whole, 1)
    return share
