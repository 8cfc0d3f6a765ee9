"""Which samples a step has, and how they are cut: the same for every number of workers and every history of resizes.

The global batch of a step is a pure function of the `Loop` and the step's number; nothing here knows who is a
member until `slices` cuts a batch that is already fixed. So workers need not tell each other what they read, a
resize needs no bookkeeping, and a step that is done again has the samples it had before. Where a sampler decides
(`Drawn`) it is asked on every worker for the whole order of an epoch; a loop without samples is counted (`Turns`).

The order must also survive an upgrade: a job that resumes from a checkpoint under another numpy would otherwise
read some samples twice and others never. Only what numpy promises to keep is used: the raw stream of the Philox bit
generator, keyed with (seed, epoch). The permutation is the order of those raw numbers, with the sample's index in
their low bits, which makes them distinct, so that every correct sort gives the same answer.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
        _check_epochs_and_seed(self.epochs, self.seed)
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

    def has(self, step: int) -> bool:
        """Whether it is not over at this step."""
        return step < self.total_steps

    @property
    def known_end(self) -> int:
        """The steps that are known without asking anybody."""
        return self.total_steps

    @property
    def cut_into(self) -> int | None:
        """Samples of a global batch; None where whoever gives them decides."""
        return self.size

    def epoch(self, step: int) -> int:
        """The epoch that a step of this loop belongs to."""
        if not 0 <= step < self.total_steps:
            raise _not_in_the_loop(step, self.total_steps)
        return step // self.steps_per_epoch

    def span(self, step: int) -> Span:
        """Where a step's batch lies in the order of its epoch."""
        start = (step - self.epoch(step) * self.steps_per_epoch) * self.size
        return start, min(start + self.size, self.samples)


class Drawn:
    """A loop whose order somebody else decides: `draw(epoch)` is the whole of it, as indices that are cut into batches
    of `batch` samples, or, without `batch`, as one list of indices for each global batch.

    Epochs may have different lengths, so one must be drawn before it is known where the next begins: they are drawn
    once each, in their order and without a gap. In every process, then, whenever it came: so `draw` may even count its
    calls. Where every epoch has `length` indices only those that are needed are drawn.
    """

    shuffle = True
    """The order is not that of the dataset."""

    def __init__(
        self,
        draw: Callable[[int], Iterable[Any]],
        *,
        samples: int,
        batch: int | None = None,
        epochs: int = 1,
        seed: int = 0,
        drop_last: bool = False,
        accumulate: int = 1,
        length: int | None = None,
        who: str = "sampler",
    ) -> None:
        if samples < 1:
            raise OrderError("the dataset has no samples: give at least one")
        if batch is not None and batch < 1:
            raise OrderError(f"the global batch has {batch} samples: size must be at least 1")
        _check_epochs_and_seed(epochs, seed)
        self.samples, self.epochs, self.seed, self.drop_last, self.who = samples, epochs, seed, drop_last, who
        self._draw, self._batch, self._accumulate = draw, batch, accumulate
        self._steps_each = self._steps(self._edges([], length)) if length is not None else None
        """Where every epoch has as many."""
        if self._steps_each == 0:
            raise OrderError(f"the {who} has {length} samples: they make no batch")
        self._firsts = [0]
        """The first step of every epoch that was drawn, and of the one after them."""
        self._largest = 0
        self._held: dict[int, _Drawing] = {}

    @property
    def size(self) -> int:
        """The most samples that a step of the first epoch has."""
        if self._batch is None:
            self._reach(0)
        return (self._batch or self._largest) * self._accumulate

    @property
    def cut_into(self) -> int | None:
        return self._batch

    @property
    def total_steps(self) -> int:
        """As far as is known: each epoch that was not drawn yet counts as the last one that was."""
        if self._steps_each is not None:
            return self._steps_each * self.epochs
        self._reach(0)
        drawn = len(self._firsts) - 1
        return self._firsts[-1] + (self._firsts[-1] - self._firsts[-2]) * (self.epochs - drawn)

    def has(self, step: int) -> bool:
        """Whether it is not over at this step. Draws up to there, so that it is known."""
        return self._reach(step)

    @property
    def known_end(self) -> int:
        """The end of the epochs that were drawn: nothing is drawn for this."""
        return self._firsts[-1] if self._steps_each is None else self._steps_each * self.epochs

    def epoch(self, step: int) -> int:
        if step < 0 or not self._reach(step):
            raise _not_in_the_loop(step, self.total_steps)
        if self._steps_each is not None:
            return step // self._steps_each
        return int(np.searchsorted(self._firsts, step, side="right")) - 1

    def span(self, step: int) -> Span:
        cuts = self._cuts(step)
        return int(cuts[0]), int(cuts[-1])

    def batches(self, step: int) -> list[Span]:
        """Where the global batches of a step lie within it: one, unless several are accumulated."""
        cuts = [int(cut) for cut in self._cuts(step)]
        return [(begin - cuts[0], end - cuts[0]) for begin, end in itertools.pairwise(cuts)]

    def order(self, epoch: int) -> NDArray[np.unsignedinteger]:
        """The indices of an epoch, without those that are dropped at its end."""
        return self._drawing(epoch).order

    def sign(self, epoch: int) -> int:
        """A hash of the order of an epoch and of how it is cut: equal on all workers, or they train on other data."""
        return self._drawing(epoch).sign

    def forget_before(self, epoch: int) -> None:
        """Nobody asks for earlier epochs any more."""
        for old in [held for held in self._held if held < epoch]:
            del self._held[old]

    def _cuts(self, step: int) -> NDArray[np.int64]:
        epoch = self.epoch(step)
        first = (step - self._first(epoch)) * self._accumulate
        return self._drawing(epoch).edges[first : first + self._accumulate + 1]

    def _first(self, epoch: int) -> int:
        return self._firsts[epoch] if self._steps_each is None else self._steps_each * epoch

    def _reach(self, step: int) -> bool:
        """Draw all epochs up to that of a step; False if it comes after the last."""
        if self._steps_each is not None:
            return step < self._steps_each * self.epochs
        while step >= self._firsts[-1] and len(self._firsts) <= self.epochs:
            epoch = len(self._firsts) - 1
            self._held[epoch] = found = self._take(epoch)
            self._largest = self._largest or int(np.diff(found.edges).max())
            self._firsts.append(self._firsts[-1] + self._steps(found.edges))
        return step < self._firsts[-1]

    def _drawing(self, epoch: int) -> _Drawing:
        if self._steps_each is None:
            while len(self._firsts) - 1 <= epoch:
                self._reach(self._firsts[-1])
        elif epoch not in self._held:
            found = self._take(epoch)
            if self._steps(found.edges) != self._steps_each:
                raise OrderError(
                    f"the {self.who} gave {len(found.order)} samples in epoch {epoch}, but has another length"
                )
            self._held[epoch] = found
        if epoch not in self._held:
            raise OrderError(f"epoch {epoch} is over")
        return self._held[epoch]

    def _take(self, epoch: int) -> _Drawing:
        given = list(self._draw(epoch))
        lengths = []
        if self._batch is None:
            lengths = [self._length(one) for one in given]
            if 0 in lengths:
                raise OrderError(f"the {self.who} gave a batch without samples in epoch {epoch}")
            given = [index for one in given for index in one]
        order = self._indices(given)
        edges = self._edges(lengths, len(order))
        if len(edges) < 2:
            few = f"{len(order)} samples" if len(order) else "no samples"
            raise OrderError(f"the {self.who} gave {few} in epoch {epoch}: they make no batch")
        order = order[: edges[-1]]
        return _Drawing(order, edges, zlib.crc32(edges.tobytes(), zlib.crc32(order.tobytes())))

    def _edges(self, lengths: list[int], count: int) -> NDArray[np.int64]:
        """Where batches begin, and where the last one ends."""
        if self._batch is None:
            return np.cumsum([0, *lengths], dtype=np.int64)
        step = self._batch * self._accumulate
        end = count // step * step if self.drop_last else count
        return np.append(np.arange(0, end, self._batch, dtype=np.int64), end)

    def _steps(self, edges: NDArray[np.int64]) -> int:
        return -(-(len(edges) - 1) // self._accumulate)

    def _length(self, given: Any) -> int:
        try:
            return len(given)
        except TypeError:
            raise OrderError(
                f"the {self.who} gave {given!r} where a list of indices was expected, the global batch of a step: "
                "pass it as sampler= if it gives single indices"
            ) from None

    def _indices(self, given: Sequence[Any]) -> NDArray[np.unsignedinteger]:
        try:
            order = np.fromiter(map(operator.index, given), dtype=np.int64, count=len(given))
        except (TypeError, OverflowError):
            odd = next(index for index in given if not _is_index(index))
            raise OrderError(
                f"the {self.who} gave {odd!r} where the index of a sample was expected, 0 to {self.samples - 1}"
                + (": pass it as batch_sampler= if it gives batches" if isinstance(odd, (list, tuple)) else "")
            ) from None
        outside = order[(order < 0) | (order >= self.samples)]
        if len(outside):
            raise OrderError(f"the {self.who} gave {outside[0]}: the dataset has the indices 0 to {self.samples - 1}")
        return order.astype(np.uint32 if self.samples <= 1 << 32 else np.uint64)


@dataclass(frozen=True)
class _Drawing:
    """One epoch of a `Drawn` loop."""

    order: NDArray[np.unsignedinteger]
    edges: NDArray[np.int64]
    sign: int


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What one `steps()` call goes through: steps without samples, in which every member has a place."""

    total_steps: int
    seed: int = 0
    size = sys.maxsize
    """Any number of members finds work in a step."""

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise OrderError(f"{self.total_steps} steps: there must be at least 1")
        _check_epochs_and_seed(1, self.seed)

    def has(self, step: int) -> bool:
        return step < self.total_steps

    @property
    def known_end(self) -> int:
        return self.total_steps

    def turn_seed(self, step: int, place: int) -> int:
        """For whatever is random in the data that a place makes in a step."""
        return sample_seed(self.seed, step, place)


AnyLoop = Loop | Drawn | Turns


def _check_epochs_and_seed(epochs: int, seed: int) -> None:
    if epochs < 1:
        raise OrderError(f"{epochs} epochs: there must be at least 1")
    if not 0 <= seed < 1 << 64:
        raise OrderError(f"seed {seed} is out of range: use 0 to 2**64 - 1")


def _not_in_the_loop(step: int, steps: int) -> OrderError:
    return OrderError(f"step {step} is not in the loop: it has steps 0 to {steps - 1}")


def _is_index(given: Any) -> bool:
    try:
        return -(1 << 63) <= operator.index(given) < 1 << 63
    except TypeError:
        return False


class Order:
    """The batches of a loop, with the orders of the last two epochs at hand.

    Two, because prefetching reads the next epoch while this one may still be cut again. An epoch is held in 4 bytes
    per sample (8 from 2**32 samples on), and making one takes 8 more for a while: for 10**8 samples 0.4 GB each,
    1.6 GB at the peak, and some 10 s; for 10**6 samples some 70 ms. Without shuffling nothing is held. Several threads
    may use it, which at worst make the same epoch twice: there is no lock, because a data loader may fork at any time.
    """

    def __init__(self, loop: Loop | Drawn) -> None:
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
        if isinstance(self.loop, Drawn):
            return self.loop.order(epoch)
        held = self._epochs
        if epoch not in held:
            self._epochs = held = dict(list(held.items())[-1:])  # makes room first
            self._epochs = held = {**held, epoch: permutation(self.loop.samples, self.loop.seed, epoch)}
        return held[epoch]


def indices(loop: Loop | Drawn, step: int) -> NDArray[np.int64]:
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


def order_seed(seed: int, epoch: int) -> int:
    """The seed under which a sampler draws an epoch, 0 to 2**63 - 1. None of the samples' seeds, which it may read."""
    digest = hashlib.sha256(b"order" + struct.pack("<QQ", seed, epoch)).digest()
    return int.from_bytes(digest[:8], "little") >> 1
