"""From a dataset to the batches that one member feeds: its slice of every global batch, with the indices really read.

Samples are read by (epoch, index): random augmentation is seeded by them, so it is the same on whichever worker and
after whatever history. With `workers` processes read ahead; when the members change, what was read ahead is cut again.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from stretto.runtime.order import sample_seed

IDLE = 2
"""With how many samples a member without a slice runs the body: BatchNorm cannot do with one."""


class Batch:
    """What the loop's body gets: the samples, collated. Unpacks like the collated value; pairs are `x` and `y` too."""

    def __init__(self, data: Any, indices: tuple[int, ...], epoch: int, step: int) -> None:
        self.data, self.indices, self.epoch, self.step = data, indices, epoch, step

    @property
    def x(self) -> Any:
        """The first part of a pair, or the whole."""
        return self.data[0] if isinstance(self.data, (tuple, list)) else self.data

    @property
    def y(self) -> Any:
        """The second part of a pair."""
        return self.data[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        """How many samples."""
        return len(self.indices)


class Part(NamedTuple):
    """One pass through the body: some samples of a step."""

    epoch: int
    step: int
    indices: tuple[int, ...]
    counts: bool = True
    """Whether they belong to this member: a member without a slice runs the body with a sample of another's."""
    share: float = 0.0
    """Of the batch that they belong to."""
    virtual: int = 0
    """In bitwise mode, whose they are."""


class Reader:
    """Reads parts, in this process or ahead of time in others."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        pin_memory: bool = False,
        prefetch: int = 2,
    ) -> None:
        self.samples = Samples(dataset, seed)
        self.collate = collate or default_collate
        self.plan = _Plan()
        self._iterator: Iterator[tuple[tuple[int, ...], Any]] | None = None
        self._loader: DataLoader[Any] | None = None
        if workers:
            self._loader = DataLoader(
                self.samples,
                batch_sampler=self.plan,
                num_workers=workers,
                pin_memory=pin_memory,
                prefetch_factor=prefetch,
                persistent_workers=True,
                collate_fn=_Collate(self.collate),
                worker_init_fn=_end_with_parent,
            )

    def follow(self, parts: Callable[[], Iterator[Part]]) -> None:
        """Hand out these parts from now on; what was read ahead is dropped."""
        self.plan.parts = parts
        self._iterator = iter(self._loader) if self._loader is not None else None

    def read(self, part: Part) -> Batch:
        """The next part, which must be this one."""
        indices, data = next(self._iterator) if self._iterator is not None else self._read_here(part)
        if indices != part.indices:
            raise RuntimeError(f"step {part.step}: samples {indices[:3]}… were read instead of {part.indices[:3]}…")
        return Batch(data, indices, part.epoch, part.step)

    def _read_here(self, part: Part) -> tuple[tuple[int, ...], Any]:
        dataset = self.samples.dataset
        if type(dataset) is TensorDataset and self.collate is default_collate:
            # What the samples would collate to, without taking everything apart into samples first.
            chosen = torch.frombuffer(array.array("q", part.indices), dtype=torch.int64)
            return part.indices, [tensor[chosen] for tensor in dataset.tensors]
        with _own_randomness() if self.samples.random else contextlib.nullcontext():
            read = [self.samples[(part.epoch, index)] for index in part.indices]
        return _Collate(self.collate)(read)


class Samples(Dataset[Any]):
    """The dataset by (epoch, index), with every random generator seeded by both."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.random = type(dataset) is not TensorDataset
        """Seeding takes longer than reading a small sample: not where nothing can be random."""

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        if not self.random:
            return index, self.dataset[index]
        seed = sample_seed(self.seed, epoch, index)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        # Not torch.manual_seed, which would seed every GPU for each sample: those are read on the CPU.
        torch.default_generator.manual_seed(seed)
        return index, self.dataset[index]


class _Plan:
    """The batch sampler of a loader: lists of (epoch, index)."""

    def __init__(self) -> None:
        self.parts: Callable[[], Iterator[Part]] = lambda: iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for part in self.parts():
            yield [(part.epoch, index) for index in part.indices]

    def __len__(self) -> int:
        return 2**31


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, read: Sequence[tuple[int, Any]]) -> tuple[tuple[int, ...], Any]:
        return tuple(index for index, _ in read), self.collate([sample for _, sample in read])


@contextlib.contextmanager
def _own_randomness() -> Iterator[None]:
    """Reading samples leaves the generators of the training as they were."""
    # numpy's is exchanged: to copy its state takes as long as to read several samples.
    before = random.getstate(), get_bit_generator(), torch.get_rng_state()
    set_bit_generator(_reading)
    try:
        yield
    finally:
        random.setstate(before[0])
        set_bit_generator(before[1])
        torch.set_rng_state(before[2])


_reading = np.random.MT19937(0)


def _end_with_parent(_: int) -> None:
    """A reader holds copies of the worker's sockets: it must not outlive it, or peers notice its end late."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
