"""A decision is a value: workers and pool per job, a reason for each, and when to ask again."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot

Memory: TypeAlias = Any
"""What a policy wants to remember: None at first, then whatever it returned last. Plain values, structs
and arrays only (it is stored), and never changed in place: a new value is returned instead."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What should hold from now on. All arrays are in the order of the snapshot's jobs."""

    workers: IntArray
    pool: IntArray
    """The pool each running job gets; ignored where workers is 0."""
    reason: IntArray
    """A code from `reasons.Reason` for every job."""
    detail: FloatArray
    """[job, 2]: the numbers that decided, as the reason's sentence uses them."""
    memory: Memory = None
    wake_s: float = math.inf
    """Absolute time to ask again although nothing happens (thresholds, quanta, rounds, leases)."""
    rejected: BoolArray | None = None
    """Jobs that are turned away for good (deadline admission)."""
    nodes: IntArray | None = None
    """[job, node] workers, from the few policies that place by themselves (pollux)."""

    @staticmethod
    def of(
        view: Snapshot,
        workers: IntArray,
        reason: IntArray,
        first: FloatArray | float = 0.0,
        second: FloatArray | float = 0.0,
        *,
        pool: IntArray | None = None,
        memory: Memory = None,
        wake_s: float = math.inf,
        rejected: BoolArray | None = None,
        nodes: IntArray | None = None,
    ) -> Decision:
        """Build a decision, by default on pool 0."""
        n = len(view)
        detail = np.empty((n, 2))
        detail[:, 0] = first
        detail[:, 1] = second
        return Decision(
            workers=workers,
            pool=np.zeros(n, np.int64) if pool is None else pool,
            reason=reason,
            detail=detail,
            memory=memory,
            wake_s=wake_s,
            rejected=rejected,
            nodes=nodes,
        )
