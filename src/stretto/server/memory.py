"""What outlives the control plane without being an event: what the cycle and the policy remember, and what was measured
of jobs that have not ended. It is kept now and then, and at the end. Whoever comes too soon is told when to come again,
so that the last change before a quiet hour is kept as well."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container
from typing import Any

import msgspec

from stretto.core import codec
from stretto.core.codec import CodecError
from stretto.core.cycle import CycleState
from stretto.core.estimate.curve import Curve
from stretto.core.policy import Policy
from stretto.server.estimates import Estimates

_log = logging.getLogger("stretto.server")

_EVERY_S = 10.0
"""A memory may be large; what is forgotten when a server is killed is little."""


class MemoryKeeper:
    """`put` stores a value of plain parts, which `recalled` is given after a restart."""

    def __init__(self, put: Callable[[dict[str, Any]], object], clock: Callable[[], float]) -> None:
        self._put, self._clock = put, clock
        self._due_s = clock() + _EVERY_S
        self._kept: CycleState | None = None

    def keep(self, policy: Policy, state: CycleState, *, at_once: bool = False) -> float:
        """When this should be called again, whatever happens until then; inf: all of it is kept."""
        if not at_once and self._clock() < self._due_s:
            return math.inf if state is self._kept else self._due_s
        self._due_s, self._kept = self._clock() + _EVERY_S, state
        try:
            self._put({"policy": _key(policy), "state": codec.plain(state)})
        except CodecError as error:
            _log.warning("what policy %s remembers will not outlive a restart: %s", policy.name, error)
        return math.inf

    def recalled(self, kept: Any, policy: Policy) -> CycleState:
        """What was kept, if it is this policy's; nothing otherwise."""
        if not isinstance(kept, dict) or kept.get("policy") != _key(policy):
            return CycleState()
        try:
            state = codec.rich(kept.get("state"), {policy.function.__module__})
        except CodecError as error:
            _log.warning("what policy %s remembered cannot be read any more: %s", policy.name, error)
            return CycleState()
        return state if isinstance(state, CycleState) else CycleState()


class SpeedKeeper:
    """One value for all jobs, so that what was measured of a job goes with it. `put` stores it, `recall` is given it
    after a restart."""

    def __init__(
        self, put: Callable[[dict[str, Any]], object], estimates: Estimates, clock: Callable[[], float]
    ) -> None:
        self._put, self._estimates, self._clock = put, estimates, clock
        self._due_s = clock() + _EVERY_S
        self._kept: dict[int, dict[str, Curve]] = {}

    def keep(self, *, at_once: bool = False) -> float:
        """When this should be called again, whatever happens until then; inf: all of it is kept."""
        if not at_once and self._clock() < self._due_s:
            return self._due_s
        self._due_s = self._clock() + _EVERY_S
        measured = self._estimates.all_measured()
        if measured != self._kept:
            self._kept = measured
            self._put({str(number): msgspec.to_builtins(curves) for number, curves in measured.items()})
        return math.inf

    def recall(self, kept: Any, jobs: Container[int]) -> None:
        """Of these jobs; the others have ended."""
        for number, measured in kept.items() if isinstance(kept, dict) else ():
            if number.isdecimal() and int(number) in jobs:
                self._estimates.remember(int(number), measured)


def _key(policy: Policy) -> list[Any]:
    return [policy.name, msgspec.to_builtins(policy.options)]
