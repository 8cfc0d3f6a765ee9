"""What `batches` and `steps` return: one loop, gone through once.

A `DataLoader` may be gone through again and again; this may not, since whoever comes later, or goes on from a
checkpoint, could not tell how often that was. A second time is refused instead of being an epoch without samples.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from inspect import GEN_CLOSED, getgeneratorstate
from typing import Any, Generic, TypeVar

from stretto.runtime.order import AnyLoop, Drawn
from stretto.torch import checks

Given = TypeVar("Given", covariant=True)


class Batches(Iterator[Given], Generic[Given]):
    """An iterator that knows its length."""

    def __init__(self, loop: AnyLoop, generator: Generator[Any, None, None]) -> None:
        self._loop = loop
        self.generator = generator

    def __iter__(self) -> Batches[Given]:
        if getgeneratorstate(self.generator) == GEN_CLOSED:
            raise checks.again()
        return self

    def __next__(self) -> Given:
        found: Given = next(self.generator)
        return found

    def __len__(self) -> int:
        """Steps of the loop."""
        if isinstance(self._loop, Drawn):
            raise TypeError("a loop with a sampler has no length: its epochs are drawn as they come")
        return self._loop.total_steps
