"""What the control plane remembers: events, a projection of every job beside them, settings, tokens.

`Store` is loaded when it is first asked for: whoever needs only the values and errors does without a database library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.store.errors import (
    Refused,
    Stale,
    StoreClosed,
    StoreCorrupted,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreTooNew,
    StoreUnreachable,
    Taken,
)
from stretto.store.model import Damaged, Entry, Loaded, Page, Query, Role, Token

if TYPE_CHECKING:
    from stretto.store.store import Store

__all__ = [
    "Damaged",
    "Entry",
    "Loaded",
    "Page",
    "Query",
    "Refused",
    "Role",
    "Stale",
    "Store",
    "StoreClosed",
    "StoreCorrupted",
    "StoreError",
    "StoreFull",
    "StoreLocked",
    "StoreTooNew",
    "StoreUnreachable",
    "Taken",
    "Token",
]


def __getattr__(name: str) -> Any:
    if name != "Store":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stretto.store.store import Store

    return Store
