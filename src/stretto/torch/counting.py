"""Those who count the batches of a loop beside it: `enumerate(loop)`, `zip(loop, range(n))`, `islice(loop, n)`.

They count what they are given. A batch that is done again would count twice, and a worker that comes later would count
from nothing: whatever a script makes of the number would be another on each worker, or another than without the loss.
So `enumerate` is told how far the job is from where it thinks it is; the others cannot be told: they are refused.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from inspect import CO_GENERATOR
from types import GeneratorType
from typing import Any

from stretto.torch import checks

_COUNT = (zip, itertools.islice, itertools.zip_longest)
_PASS_ON = (tuple, itertools.chain, map, filter)
"""A `zip` has a tuple of what it goes through."""


def move(passage: object, by: int) -> None:
    """Called while its next batch is asked for: that is so many steps ahead of where those who count think it is."""
    seen: set[int] = set()
    waiting = [passage, *_generators_under_way()]
    while waiting:
        for one in gc.get_referrers(waiting.pop()):
            if id(one) in seen:
                continue
            seen.add(id(one))
            if type(one) is enumerate:
                _move(one, by)
            elif type(one) in _COUNT:
                raise checks.counts_batches(type(one).__name__)
            elif type(one) in _PASS_ON:
                waiting.append(one)


def _generators_under_way() -> list[object]:
    """Those that this batch is asked for by: what goes through a loop and passes it on, as progress bars do. As long as
    they run they do not show what they hold."""
    frames = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_flags & CO_GENERATOR:
            frames.append(frame)
    if not frames:
        return []
    return [one for one in gc.get_objects() if type(one) is GeneratorType and one.gi_frame in frames]


def _move(counter: enumerate[Any], by: int) -> None:
    """Python has no way to set it, so it is set where it lies; what it says of itself shows whether it lies there."""
    place = ctypes.c_ssize_t.from_address(id(counter) + object.__basicsize__)
    index = _index(counter)
    if place.value != index:
        raise checks.counts_batches("enumerate")
    place.value = index + by
    if _index(counter) != index + by:
        place.value = index
        raise checks.counts_batches("enumerate")


def _index(counter: enumerate[Any]) -> int:
    made: Any = counter.__reduce__()
    return int(made[1][1])
