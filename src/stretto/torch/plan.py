"""What one `batches()` call goes through, and how a member's part of a step is cut into passes through the body.

A step is what is applied, or done again, as a whole: one global batch, or `accumulate` of them. Each batch is cut into
one slice per member; a slice is cut into passes of at most `per_worker` samples. In bitwise mode the passes belong to
virtual ranks instead.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from stretto.errors import UsageError
from stretto.runtime.order import AnyLoop, Drawn, Loop, Order, Span, Turns, micro, owned, slice_of
from stretto.torch import virtual
from stretto.torch.bitwise import NOBODY
from stretto.torch.data import IDLE, Batch, Part, Reader
from stretto.torch.sampling import Source

_LOOKED_AT = 2
"""Samples."""
SIGNS = 64
"""Few, because sums of their squares travel in the type of the gradients."""


class Plan:
    """The steps of one loop."""

    loop: AnyLoop

    def __init__(
        self,
        loop: Loop | Drawn,
        *,
        accumulate: int = 1,
        per_worker: int | None = None,
        virtual_ranks: int = 0,
        weight: Callable[[Batch], float] | None = None,
    ) -> None:
        self.loop, self.per_worker, self.virtual_ranks, self.weight = loop, per_worker, virtual_ranks, weight
        self.accumulate = accumulate
        self.in_passes = accumulate > 1 or per_worker is not None or virtual_ranks > 0
        """Whether a step may take several passes through the body, at some number of workers."""
        self.order = Order(loop)
        self._samples = loop
        self._drawn = ""
        """What the sampler gave in the epoch under way."""
        self.data = 0
        """`Reader.sign` of the data."""
        micro(0, 1, per_worker)

    @property
    def size(self) -> int:
        """Samples of one global batch; a step of the loop has `accumulate` of them."""
        return self.loop.size // self.accumulate

    @property
    def summary(self) -> str:
        """What must be equal on all members, in words."""
        loop = self._samples
        order = self._drawn if isinstance(loop, Drawn) else f"shuffle {loop.shuffle}"
        return (
            f"{loop.samples} samples, size {self.size}, {loop.epochs} epochs, seed {loop.seed}, "
            f"accumulate {self.accumulate}, {order}, drop_last {loop.drop_last}, data {self.data:08x}"
        )

    @property
    def fixed(self) -> str:
        """What of it is known before anything is read or drawn, in words."""
        loop = self._samples
        return (
            f"{loop.samples} samples, size {loop.cut_into}, {loop.epochs} epochs, "
            f"seed {loop.seed}, accumulate {self.accumulate}, drop_last {loop.drop_last}"
        )

    def sign(self, step: int) -> int:
        """A small number that is equal on all members if their loops are, and soon is not if they are not. Of the step
        that begins: what came before it will not be asked for again."""
        if isinstance(self._samples, Drawn):
            epoch = self._samples.epoch(step)
            self._samples.forget_before(epoch)
            self._drawn = f"order {self._samples.sign(epoch):08x} by {self._samples.who} in epoch {epoch}"
        return zlib.crc32(f"{self.summary} {step}".encode()) % SIGNS

    def parts(self, step: int, place: int, places: int) -> list[Part]:
        """The passes of the member at this place (-1: it has no slice) in one step."""
        if self.virtual_ranks:
            return list(virtual.parts(self.order, step, place, places, self.virtual_ranks))
        epoch, samples = self._samples.epoch(step), self.order.samples
        found = []
        for first, last in self._batches(step):
            own = slice_of(last - first, places, place) if place >= 0 else (0, 0)
            for begin, end in micro(*own, self.per_worker):
                fed = tuple(samples(step, first + begin, first + end))
                found.append(Part(epoch, step, fed, True, (end - begin) / (last - first), first=first + begin))
        # The body must run, so that the step is applied here too: with samples that count for nothing.
        start, stop = self._samples.span(step)
        return found or [Part(epoch, step, tuple(samples(step, 0, min(IDLE, stop - start))), False)]

    def look_at(self, reader: Reader) -> None:
        """A few samples, so that `sign` is another where the data is."""
        if self.loop.has(0):
            first = self.order.indices(0)[:_LOOKED_AT].tolist()
            self.data = reader.sign([(self._samples.epoch(0), index) for index in first])

    def rehearsal(self, members: int) -> list[Part]:
        """Passes that count for nothing, with as many samples as a member has later, and with as many as at first."""
        indices, epoch = self.order.indices(0), self._samples.epoch(0)
        slice_size = max(IDLE, min(self.size, len(indices)) // (self.virtual_ranks or members))
        return [
            Part(epoch, 0, tuple(indices[:count].tolist()), False)
            for count in (min(slice_size, self.per_worker or slice_size), IDLE)
        ]

    def rows(self, part: Part) -> int:
        """How many samples the step of a part has, of all members together."""
        start, stop = self._samples.span(part.step)
        return stop - start

    def batches(self, step: int) -> int:
        """How many global batches the step has."""
        return len(self._batches(step))

    def ahead(self, begin: list[Part], first: int, rank: int, size: int) -> Iterator[Part]:
        """Everything from a step on: its parts as given, later ones as they are if the members stay."""
        yield from begin
        step = first + 1
        while self.loop.has(step):
            yield from self.parts(step, rank, size)
            step += 1

    def _batches(self, step: int) -> list[Span]:
        """Where the global batches of a step lie within it."""
        if isinstance(self._samples, Drawn):
            return self._samples.batches(step)
        start, stop = self._samples.span(step)
        return [(first, min(first + self.size, stop - start)) for first in range(0, stop - start, self.size)]


class TurnPlan(Plan):
    """A loop without samples: every member has one place in a step, and all places count alike. In bitwise mode the
    virtual ranks are the places."""

    def __init__(self, loop: Turns, virtual_ranks: int) -> None:
        self.loop, self.virtual_ranks, self.accumulate, self.weight = loop, virtual_ranks, 1, None
        self.in_passes = virtual_ranks > 0

    def look_at(self, reader: Reader) -> None:
        """There is no data."""

    @property
    def fixed(self) -> str:
        return self.summary

    @property
    def summary(self) -> str:
        return f"{self.loop.total_steps} steps, seed {self.loop.seed}"

    def sign(self, step: int) -> int:
        return zlib.crc32(f"{self.summary} {step}".encode()) % SIGNS

    def parts(self, step: int, place: int, places: int) -> list[Part]:
        if ranks := self.virtual_ranks:
            owns = owned(ranks, places)[place]
            turns = [Part(0, step, (one,), True, 1 / ranks, one, ranks) for one in owns]
            return turns or [Part(0, step, (0,), False, 0.0, NOBODY, ranks)]
        share = 1 / places if place >= 0 else 0.0
        return [Part(0, step, (max(place, 0),), place >= 0, share, places=places, first=max(place, 0))]

    def rehearsal(self, members: int) -> list[Part]:
        return [Part(0, 0, (0,), False, places=self.virtual_ranks or members)]

    def rows(self, part: Part) -> int:
        return part.places

    def batches(self, step: int) -> int:
        return 1


def make(
    source: Source,
    *,
    epochs: int,
    seed: int,
    accumulate: int,
    per_worker: int | None,
    virtual_ranks: int,
    weight: Callable[[Batch], float] | None,
) -> Plan:
    """The plan of a `batches()` call; raises what is wrong with its arguments."""
    if accumulate < 1:
        raise UsageError(f"accumulate={accumulate}", hint="a step needs at least 1 batch")
    if accumulate > 1 and virtual_ranks:
        raise UsageError(
            f"accumulate={accumulate} in bitwise mode",
            hint=f"use a global batch that is {accumulate} times as large: a pass has only the samples of one of "
            f"{virtual_ranks} virtual ranks",
        )
    return Plan(
        source.loop(epochs=epochs, seed=seed, accumulate=accumulate),
        accumulate=accumulate,
        per_worker=per_worker,
        virtual_ranks=virtual_ranks,
        weight=weight,
    )
