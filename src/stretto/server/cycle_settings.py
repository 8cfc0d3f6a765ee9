"""Settings of the cycle that administrators choose next to a policy's own options (`--set`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from stretto.core import options, placement
from stretto.core.cycle import LIVE, Settings
from stretto.errors import StrettoError

NAMES = ("stops_lose_work", "hysteresis", "reserve_after_s")


_log = logging.getLogger("stretto.server")
_FIRST: dict[str, Any] = {"name": "stretto", "options": {}, "placement": "fewest-moves"}


class _Chosen(msgspec.Struct):
    """A policy, as it is stored."""

    name: str
    placement: str
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}


def chosen(stored: Any) -> dict[str, Any]:
    """The policy that was stored; the first one of all, where nothing is that can be used."""
    if stored is None:
        return _FIRST
    try:
        found = msgspec.convert(stored, _Chosen)
        placement.load(found.placement)
        read(found.settings, LIVE)
    except (msgspec.ValidationError, StrettoError) as error:
        _log.error("the policy that was chosen cannot be read any more, stretto decides: %s", error)
        return _FIRST
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What belongs to the cycle, and what to the policy."""
    own = {name: value for name, value in options.items() if name in NAMES}
    return own, {name: value for name, value in options.items() if name not in own}


def read(given: Mapping[str, Any], before: Settings) -> Settings:
    """The settings with these changed; values may be texts."""
    hint = "stops_lose_work=true|false, hysteresis=true|false|null, reserve_after_s=SECONDS"
    found = options.read(Settings, given, "the cycle", hint)
    return msgspec.structs.replace(before, **{name: getattr(found, name) for name in given})


def unusual(settings: Settings) -> dict[str, Any]:
    """Those that are not as they are by default."""
    usual = LIVE
    return {name: value for name in NAMES if (value := getattr(settings, name)) != getattr(usual, name)}
