"""Where a script is that counts epochs with `job.epochs`, for those who come later and for checkpoints.

A script may count several times, one after the other or one inside of another (folds, and epochs of each). Calls are
numbered as they begin; so a worker that goes straight to a later epoch has to know how many calls came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where one call of `epochs` is."""

    call: int
    epoch: int
    loop: int
    """That this epoch began with."""
    calls: int
    """Begun before the body of this epoch, this one included."""


def read(given: Iterable[Sequence[int]]) -> list[Place]:
    """From a message or a checkpoint; older ones have the epoch and its loop of every call in turn."""
    return [
        Place(*one) if len(one) == len(Place._fields) else Place(call, one[0], one[1], call + 1)
        for call, one in enumerate(given)
    ]


def find(places: Iterable[Place], call: int) -> Place | None:
    return next((place for place in places if place.call == call), None)


def note(places: list[Place], here: Place) -> list[Place]:
    """An epoch begins: calls that were made inside of the one before are over. What was restored and is still ahead
    stays."""
    known = find(places, here.call)
    if known is not None and known >= here:
        return places
    return [*(place for place in places if place.call < here.call), here]
