"""What `batches` and `steps` return: one loop, gone through once.

A `DataLoader` may be gone through again and again; this may not, since whoever comes later, or goes on from a
checkpoint, could not tell how often that was. A second time is refused instead of being an epoch without samples.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from inspect import GEN_CLOSED, GEN_SUSPENDED, getgeneratorstate
from typing import Any, Generic, Protocol, TypeVar

from stretto.runtime.order import AnyLoop, Drawn
from stretto.torch import checks, counting

Given = TypeVar("Given", covariant=True)


class Watcher(Protocol):
    """The job of a loop."""

    def goes_on(self, loop: Generator[Any, None, None]) -> None:
        """The script asks for the next batch."""

    def pauses(self, loop: Generator[Any, None, None]) -> None:
        """The script is not in the body any more."""

    def steps_before(self) -> int:
        """How many steps of the loop come before the batch that was just given; -1 where batches are no steps."""


class Batches(Iterator[Given], Generic[Given]):
    """An iterator that knows its length. A `for` over it goes by a `Passage`, so that its end is noticed though a
    variable may hold the loop: then the script is not in the body any more, and may come back or not."""

    def __init__(self, loop: AnyLoop, generator: Generator[Any, None, None], watcher: Watcher) -> None:
        self._loop, self._watcher = loop, watcher
        self.generator = generator

    def __iter__(self) -> Passage[Given]:
        if getgeneratorstate(self.generator) == GEN_CLOSED:
            raise checks.again()
        return Passage(self)

    def __next__(self) -> Given:
        self._watcher.goes_on(self.generator)
        found: Given = next(self.generator)
        return found

    def __len__(self) -> int:
        """Steps of the loop."""
        if isinstance(self._loop, Drawn):
            raise TypeError("a loop with a sampler has no length: its epochs are drawn as they come")
        return self._loop.total_steps

    def steps_before(self) -> int:
        return self._watcher.steps_before()

    def left(self) -> None:
        """A `for` has ended in the body."""
        if getgeneratorstate(self.generator) == GEN_SUSPENDED:
            self._watcher.pauses(self.generator)


class Passage(Iterator[Given], Generic[Given]):
    """Through a loop, for as long as a `for` lasts."""

    def __init__(self, batches: Batches[Given]) -> None:
        self._batches = batches
        self._began = False
        self._steps = 0
        """That this batch would be the next after, if each came once."""

    @property
    def generator(self) -> Generator[Any, None, None]:
        return self._batches.generator

    def __iter__(self) -> Passage[Given]:
        return self

    def __next__(self) -> Given:
        self._began = True
        found = next(self._batches)
        before = self._batches.steps_before()
        if before not in (-1, self._steps):
            counting.move(self, before - self._steps)
        self._steps = (self._steps if before == -1 else before) + 1
        return found

    def __del__(self) -> None:
        if self._began:
            self._batches.left()
