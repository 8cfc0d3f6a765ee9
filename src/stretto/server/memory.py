"""What the cycle and the policy remember outlives the server: it is stored now and then, and at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from stretto.core import codec
from stretto.core.codec import CodecError
from stretto.core.cycle import CycleState
from stretto.core.policy import Policy
from stretto.store import Store

_log = logging.getLogger("stretto.server")

_SETTING = "memory"
_EVERY_S = 10.0
"""A memory may be large; what is forgotten when a server is killed is little."""


class MemoryKeeper:
    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._kept_s = clock()

    def keep(self, policy: Policy, state: CycleState, *, at_once: bool = False) -> None:
        if not at_once and self._clock() - self._kept_s < _EVERY_S:
            return
        self._kept_s = self._clock()
        try:
            self._store.put_setting(_SETTING, {"policy": _key(policy), "state": codec.plain(state)})
        except CodecError as error:
            _log.warning("what policy %s remembers will not outlive the server: %s", policy.name, error)

    def recalled(self, settings: Mapping[str, Any], policy: Policy) -> CycleState:
        """What was kept, if it is this policy's; nothing otherwise."""
        kept = settings.get(_SETTING)
        if not kept or kept["policy"] != _key(policy):
            return CycleState()
        try:
            state = codec.rich(kept["state"], {policy.function.__module__})
        except CodecError as error:
            _log.warning("what policy %s remembered cannot be read any more: %s", policy.name, error)
            return CycleState()
        return state if isinstance(state, CycleState) else CycleState()


def _key(policy: Policy) -> list[Any]:
    return [policy.name, msgspec.to_builtins(policy.options)]
