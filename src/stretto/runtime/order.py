"""Which samples a step has, and how they are cut: the same for every number of workers and every history of resizes.

The global batch of a step is a pure function of the `Loop` and the step's number; nothing here knows who is a
member until `slices` cuts a batch that is already fixed. So workers need not tell each other what they read, a
resize needs no bookkeeping, and a step that is done again has the samples it had before.

The order must also survive an upgrade: a job that resumes from a checkpoint under another numpy would otherwise
read some samples twice and others never. Only what numpy promises to keep is used: the raw stream of the Philox bit
generator, keyed with (seed, epoch). The permutation is the order of those raw numbers, with the sample's index in
their low bits, which makes them distinct, so that every correct sort gives the same answer.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Span = tuple[int, int]
"""Start and stop of a contiguous part."""


_CHUNK = 1 << 20


class OrderError(ValueError):
    """A loop, or a cut of a batch, that cannot be; the text says what to change."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What one `batches()` call goes through. No sample is lost: the last batch of an epoch may be smaller."""

    samples: int
    """Length of the dataset."""
    size: int
    """Samples of a global batch."""
    epochs: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """Leave the smaller last batch out."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise OrderError("the dataset has no samples: give at least one")
        if self.size < 1:
            raise OrderError(f"the global batch has {self.size} samples: size must be at least 1")
        if self.epochs < 1:
            raise OrderError(f"{self.epochs} epochs: there must be at least 1")
        if not 0 <= self.seed < 1 << 64:
            raise OrderError(f"seed {self.seed} is out of range: use 0 to 2**64 - 1")
        if self.drop_last and self.samples < self.size:
            raise OrderError(
                f"the dataset has {self.samples} samples and the global batch {self.size}:"
                f" drop_last leaves no batch; use size={self.samples} or less, or drop_last=False"
            )

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.samples // self.size if self.drop_last else -(-self.samples // self.size)

    @cached_property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def epoch(self, step: int) -> int:
        """The epoch that a step of this loop belongs to."""
        if not 0 <= step < self.total_steps:
            raise OrderError(f"step {step} is not in the loop: it has steps 0 to {self.total_steps - 1}")
        return step // self.steps_per_epoch

    def span(self, step: int) -> Span:
        """Where a step's batch lies in the order of its epoch."""
        start = (step - self.epoch(step) * self.steps_per_epoch) * self.size
        return start, min(start + self.size, self.samples)


class Order:
    """The batches of a loop, with the orders of the last two epochs at hand.

    Two, because prefetching reads the next epoch while this one may still be cut again. An epoch is held in 4 bytes
    per sample (8 from 2**32 samples on), and making one takes 8 more for a while: for 10**8 samples 0.4 GB each,
    1.6 GB at the peak, and some 10 s; for 10**6 samples some 70 ms. Without shuffling nothing is held. Several threads
    may use it, which at worst make the same epoch twice: there is no lock, because a data loader may fork at any time.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._epochs: dict[int, NDArray[np.unsignedinteger]] = {}

    def indices(self, step: int) -> NDArray[np.int64]:
        """The global batch of a step."""
        start, stop = self.loop.span(step)
        if not self.loop.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return self._permutation(self.loop.epoch(step))[start:stop].astype(np.int64)

    def samples(self, step: int, first: int, last: int) -> list[int]:
        """Some of the global batch of a step."""
        start, _ = self.loop.span(step)
        if not self.loop.shuffle:
            return list(range(start + first, start + last))
        found: list[int] = self._permutation(self.loop.epoch(step))[start + first : start + last].tolist()
        return found

    def prepare(self, epoch: int) -> None:
        """Make an epoch's order ahead of its first batch, from another thread for instance."""
        if self.loop.shuffle and 0 <= epoch < self.loop.epochs:
            self._permutation(epoch)

    def _permutation(self, epoch: int) -> NDArray[np.unsignedinteger]:
        held = self._epochs
        if epoch not in held:
            self._epochs = held = dict(list(held.items())[-1:])  # makes room first
            self._epochs = held = {**held, epoch: permutation(self.loop.samples, self.loop.seed, epoch)}
        return held[epoch]


def indices(loop: Loop, step: int) -> NDArray[np.int64]:
    """The global batch of a step. Makes the whole epoch's order each time: loops use an `Order`."""
    return Order(loop).indices(step)


def permutation(samples: int, seed: int, epoch: int) -> NDArray[np.unsignedinteger]:
    """All samples once, in the order of an epoch."""
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(samples)
    low = np.uint64((samples - 1).bit_length())
    keys >>= low
    keys <<= low
    for start in range(0, samples, _CHUNK):
        stop = min(start + _CHUNK, samples)
        keys[start:stop] |= np.arange(start, stop, dtype=np.uint64)
    keys.sort()
    keys &= (np.uint64(1) << low) - np.uint64(1)
    return keys.astype(np.uint32) if samples <= 1 << 32 else keys


def slices(count: int, members: int) -> list[Span]:
    """`count` samples cut into one contiguous slice per member, the larger ones first; a slice may be empty."""
    return [slice_of(count, members, rank) for rank in range(max(members, 1))]


def slice_of(count: int, members: int, rank: int) -> Span:
    """The slice of one member."""
    if members < 1 or count < 0:
        raise OrderError(f"cannot cut {count} samples for {members} members")
    least, more = divmod(count, members)
    start = rank * least + min(rank, more)
    return start, start + least + (rank < more)


def virtual_slices(count: int, virtual_ranks: int) -> list[Span]:
    """The cut of bitwise mode: one slice per virtual rank, whoever computes it."""
    if virtual_ranks < 1:
        raise OrderError(f"{virtual_ranks} virtual ranks: there must be at least 1")
    return slices(count, virtual_ranks)


def owned(virtual_ranks: int, members: int) -> list[range]:
    """The virtual ranks of each member: contiguous, balanced; none if members outnumber ranks."""
    return [range(start, stop) for start, stop in slices(virtual_ranks, members)]


def micro(start: int, stop: int, per_worker: int | None) -> list[Span]:
    """A slice cut into the fewest micro-batches of at most `per_worker` samples (None: no bound); [] if empty."""
    if per_worker is not None and per_worker < 1:
        raise OrderError(f"per_worker={per_worker}: a forward pass needs at least 1 sample")
    count = stop - start
    if count <= 0:
        return []
    if per_worker is None or count <= per_worker:
        return [(start, stop)]
    parts = -(-count // per_worker)
    return [(start + first, start + last) for first, last in slices(count, parts)]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """The seed for a sample's random augmentation, 0 to 2**63 - 1: the same on every platform and for every worker."""
    digest = hashlib.sha256(struct.pack("<QQQ", seed, epoch, index)).digest()
    return int.from_bytes(digest[:8], "little") >> 1
