"""What one `batches()` call goes through, and how a member's part of a step is cut into passes through the body.

A step is what is applied, or done again, as a whole: one global batch, or `accumulate` of them. Each batch is cut into
one slice per member; a slice is cut into passes of at most `per_worker` samples. In bitwise mode the passes belong to
virtual ranks instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from stretto.errors import UsageError
from stretto.runtime.order import Loop, Order, micro, slice_of
from stretto.torch import virtual
from stretto.torch.data import IDLE, Batch, Part

SIGNS = 64
"""Few, because sums of their squares travel in the type of the gradients."""


class Plan:
    """The steps of one loop."""

    def __init__(
        self,
        loop: Loop,
        *,
        accumulate: int = 1,
        per_worker: int | None = None,
        virtual_ranks: int = 0,
        weight: Callable[[Batch], float] | None = None,
    ) -> None:
        self.loop, self.per_worker, self.virtual_ranks, self.weight = loop, per_worker, virtual_ranks, weight
        self.size = loop.size // accumulate
        """Samples of one global batch; a step of the loop has `accumulate` of them."""
        self.order = Order(loop)
        self.summary = (
            f"{loop.samples} samples, size {self.size}, {loop.epochs} epochs, seed {loop.seed}, "
            f"accumulate {accumulate}, shuffle {loop.shuffle}, drop_last {loop.drop_last}"
        )
        micro(0, loop.size, per_worker)

    def sign(self, step: int) -> int:
        """A small number that is equal on all members if their loops are, and soon is not if they are not."""
        return zlib.crc32(f"{self.summary} {step}".encode()) % SIGNS

    def parts(self, step: int, place: int, places: int) -> list[Part]:
        """The passes of the member at this place (-1: it has no slice) in one step."""
        if self.virtual_ranks:
            return list(virtual.parts(self.order, step, place, places, self.virtual_ranks))
        epoch, samples = self.loop.epoch(step), self.order.samples
        start, stop = self.loop.span(step)
        found = []
        for first in range(0, stop - start, self.size):
            count = min(self.size, stop - start - first)
            own = slice_of(count, places, place) if place >= 0 else (0, 0)
            for begin, end in micro(*own, self.per_worker):
                fed = tuple(samples(step, first + begin, first + end))
                found.append(Part(epoch, step, fed, True, (end - begin) / count))
        # The body must run, so that the step is applied here too: with samples that count for nothing.
        return found or [Part(epoch, step, tuple(samples(step, 0, min(IDLE, stop - start))), False)]

    def rehearsal(self, members: int) -> list[Part]:
        """Passes that count for nothing, with as many samples as a member has later, and with as many as at first."""
        indices, epoch = self.order.indices(0), self.loop.epoch(0)
        slice_size = max(IDLE, min(self.size, len(indices)) // (self.virtual_ranks or members))
        return [
            Part(epoch, 0, tuple(indices[:count].tolist()), False)
            for count in (min(slice_size, self.per_worker or slice_size), IDLE)
        ]

    def batches(self, step: int) -> int:
        """How many global batches the step has."""
        start, stop = self.loop.span(step)
        return -(-(stop - start) // self.size)

    def ahead(self, begin: list[Part], first: int, rank: int, size: int) -> Iterator[Part]:
        """Everything from a step on: its parts as given, later ones as they are if the members stay."""
        yield from begin
        for step in range(first + 1, self.loop.total_steps):
            yield from self.parts(step, rank, size)


def make(
    samples: int,
    *,
    size: int,
    epochs: int,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    accumulate: int,
    per_worker: int | None,
    virtual_ranks: int,
    weight: Callable[[Batch], float] | None,
) -> Plan:
    """The plan of a `batches()` call; raises what is wrong with its arguments."""
    if 0 < samples < size:
        raise UsageError(
            f"the dataset has {samples} samples, a global batch {size}",
            hint=f"use size={samples} or less, or more data",
        )
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}", hint="a step needs at least 1 batch")
    if accumulate > 1 and virtual_ranks:
        raise UsageError(
            f"accumulate={accumulate} in bitwise mode",
            hint=f"use size={size * accumulate}: a pass has only the samples of one of {virtual_ranks} virtual ranks",
        )
    steps = Loop(
        samples=samples, size=size * accumulate, epochs=epochs, seed=seed, shuffle=shuffle, drop_last=drop_last
    )
    return Plan(steps, accumulate=accumulate, per_worker=per_worker, virtual_ranks=virtual_ranks, weight=weight)
