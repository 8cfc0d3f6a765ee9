"""The placements: which node each worker gets. This table is the one list of names.

A placement is a pure function `(view, workers, pool) -> [job, node] workers`. It keeps what is already well
placed (`view.placed`). A job that cannot be placed in full gets fewer workers (at least its minimum), or none.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeAlias

from stretto.core.snapshot import IntArray, Snapshot
from stretto.errors import unknown

Placement: TypeAlias = Callable[[Snapshot, IntArray, IntArray], IntArray]

_HERE = "stretto.core.placement."

BUILTIN: dict[str, str] = {
    "pack": _HERE + "pack",
    "spread": _HERE + "spread",
    "fill": _HERE + "fill",
    "fewest-nodes": _HERE + "fewest_nodes",
    "fewest-moves": _HERE + "fewest_moves",
}


def load(name: str) -> Placement:
    """The placement of that name: the function `place` of its module."""
    if name not in BUILTIN:
        raise unknown("placement", name, list(BUILTIN))
    place: Placement = importlib.import_module(BUILTIN[name]).place
    return place
