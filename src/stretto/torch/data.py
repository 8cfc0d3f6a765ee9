"""From a dataset to the batches that one member feeds: its slice of every global batch, with the indices really read.

Samples are read by (epoch, index): random augmentation is seeded by them, so it is the same on whichever worker and
after whatever history. With `workers` processes read ahead; when the members change, what was read ahead is cut again.
"""

from __future__ import annotations

import array
import contextlib
import copy
import ctypes
import multiprocessing
import os
import signal
import zlib
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from stretto.runtime.order import Turns, sample_seed
from stretto.torch import checks
from stretto.torch.seeding import generators, own_randomness, position, seed_all

_GIST = 1 << 16
"""So many whole numbers of a sample are looked at."""
IDLE = 2
"""With how many samples a member without a slice runs the body: BatchNorm cannot do with one."""


class Batch:
    """What the loop's body gets: the samples, collated. It unpacks like the collated value, and has its keys: of
    samples that are dictionaries `batch["x"]`, `batch.x` and `model(**batch)`; pairs are `x` and `y` too."""

    last = False
    """Whether this pass through the body is the last of its step, in which `step()` counts."""

    def __init__(self, data: Any, indices: tuple[int, ...], epoch: int, step: int) -> None:
        self.data, self.indices, self.epoch, self.step = data, indices, epoch, step

    @property
    def x(self) -> Any:
        """The first part of a pair, what is called so, or the whole."""
        if isinstance(self.data, Mapping) and "x" in self.data:
            return self.data["x"]
        return self.data[0] if isinstance(self.data, (tuple, list)) else self.data

    @property
    def y(self) -> Any:
        """The second part of a pair, or what is called so."""
        return self.data["y" if isinstance(self.data, Mapping) else 1]

    def keys(self) -> KeysView[Any]:
        """Of samples that are dictionaries."""
        return self._mapping().keys()

    def values(self) -> ValuesView[Any]:
        return self._mapping().values()

    def items(self) -> ItemsView[Any, Any]:
        return self._mapping().items()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._mapping().get(key, default)

    def _mapping(self) -> Mapping[Any, Any]:
        if not isinstance(self.data, Mapping):
            raise TypeError(
                f"the samples of this dataset are no dictionaries but collate to a {type(self.data).__name__}: "
                "unpack the batch, or take its parts by number"
            )
        return self.data

    def to(self, *args: Any, **kwargs: Any) -> Batch:
        """The same batch with its tensors elsewhere, or of another type: what `Tensor.to` takes."""
        found = copy.copy(self)
        found.data = _to(self.data, *args, **kwargs)
        return found

    def __getattr__(self, name: str) -> Any:
        """Keys of dictionaries, fields of named tuples, and what a collated object of another kind has."""
        data = self.__dict__.get("data")
        if isinstance(data, Mapping) and name in data:
            return data[name]
        own = isinstance(data, tuple) and name in getattr(data, "_fields", ())
        if not name.startswith("__") and (own or not isinstance(data, (Mapping, list, tuple, torch.Tensor))):
            return getattr(data, name)
        known = f"; its samples have {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
        raise AttributeError(f"a batch has no {name!r}{known}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        """How many samples."""
        return len(self.indices)


class Turn:
    """What the body of a `steps()` loop gets: which of the `places` of a step this worker has, and a seed for what it
    makes there."""

    last = False
    """As that of a `Batch`."""

    def __init__(self, step: int, place: int, places: int, seed: int) -> None:
        self.step, self.place, self.places, self.seed = step, place, places, seed

    def __repr__(self) -> str:
        return f"Turn(step={self.step}, place={self.place}, places={self.places}, seed={self.seed})"


def _to(data: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(data, Mapping):
        moved = {key: _to(value, *args, **kwargs) for key, value in data.items()}
        return moved if type(data) is dict or not hasattr(data, "to") else data.to(*args, **kwargs)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_to(value, *args, **kwargs) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_to(value, *args, **kwargs) for value in data)
    return data.to(*args, **kwargs) if hasattr(data, "to") else data


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
    places: int = 0
    """In a loop without samples, how many share the step; the index is the place."""
    first: int = 0
    """Where they begin in the step's samples."""


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
        init: Callable[[int], None] | None = None,
        context: BaseContext | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """`context`: how processes are started; `timeout_s`: how long one batch may take them, 0 for ever."""
        self.samples = Samples(dataset, seed)
        self.collate = collate or default_collate
        self.draws = not workers and collate not in (None, default_collate)
        """Whether samples are put together here by something that may draw random numbers, such as masks."""
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
                worker_init_fn=_Init(init),
                multiprocessing_context=context,
                timeout=timeout_s,
            )

    def follow(self, parts: Callable[[], Iterator[Part]]) -> None:
        """Hand out these parts from now on; what was read ahead is dropped."""
        self.plan.parts = parts
        self._iterator = iter(self._loader) if self._loader is not None else None

    def sign(self, places: Sequence[tuple[int, int]]) -> int:
        """Of what a few samples are, by (epoch, index): equal on all workers if their data is. 0 where others read."""
        if self._loader is not None:
            return 0
        with own_randomness() if self.samples.random else contextlib.nullcontext():
            return zlib.crc32(repr([_gist(self.samples._read(*place)) for place in places]).encode())

    def read(self, part: Part) -> Any:
        """The next part, which must be this one."""
        indices, data = next(self._iterator) if self._iterator is not None else self._read_here(part)
        if isinstance(data, _Unsteady):
            raise checks.unsteady_sample(data.index, data.epoch)
        if indices != part.indices:
            raise RuntimeError(f"step {part.step}: samples {indices[:3]}… were read instead of {part.indices[:3]}…")
        return Batch(data, indices, part.epoch, part.step)

    def _read_here(self, part: Part) -> tuple[tuple[int, ...], Any]:
        dataset = self.samples.dataset
        if type(dataset) is TensorDataset and self.collate is default_collate:
            # What the samples would collate to, without taking everything apart into samples first.
            chosen = torch.frombuffer(array.array("q", part.indices), dtype=torch.int64)
            return part.indices, [tensor[chosen] for tensor in dataset.tensors]
        with own_randomness() if self.samples.random else contextlib.nullcontext():
            read = [self.samples[(part.epoch, index)] for index in part.indices]
        return _Collate(self.collate)(read)


class TurnReader(Reader):
    """Reads nothing: the script makes its own data, and is told where it is."""

    draws = False

    def __init__(self, loop: Turns) -> None:
        self.loop = loop

    def follow(self, parts: Callable[[], Iterator[Part]]) -> None:
        pass

    def sign(self, places: Sequence[tuple[int, int]]) -> int:
        return 0

    def read(self, part: Part) -> Any:
        (place,) = part.indices
        return Turn(part.step, place, part.places, self.loop.turn_seed(part.step, place))


class Samples(Dataset[Any]):
    """The dataset by (epoch, index), with every global random generator seeded by both.

    The first sample that a process reads is read twice: one that is then another has randomness of its own, which
    would depend on who reads what. (In the process that reads, because some datasets open their files there.)
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.random = type(dataset) is not TensorDataset
        """Seeding takes longer than reading a small sample: not where nothing can be random."""
        self._checked = not self.random

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = key
        if not self.random:
            return index, self.dataset[index]
        if not self._checked:
            self._checked = True
            if not self._is_steady(epoch, index):
                return index, _Unsteady(index, epoch)
        return index, self._read(epoch, index)

    def _read(self, epoch: int, index: int) -> Any:
        seed_all(sample_seed(self.seed, epoch, index))
        return self.dataset[index]

    def _is_steady(self, epoch: int, index: int) -> bool:
        own = generators(self.dataset)
        before = [position(generator) for generator in own]
        first = self._read(epoch, index)
        return before == [position(generator) for generator in own] and _steady(first, self._read(epoch, index))


@dataclass(frozen=True)
class _Unsteady:
    """Instead of a sample: it was another when it was read again."""

    index: int
    epoch: int


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
        indices, samples = tuple(index for index, _ in read), [sample for _, sample in read]
        odd = next((sample for sample in samples if isinstance(sample, _Unsteady)), None)
        return indices, self.collate(samples) if odd is None else odd


def _steady(first: Any, second: Any) -> bool:
    """Whether two readings of one sample are the same, as far as numbers tell."""
    if isinstance(first, torch.Tensor):
        return not isinstance(second, torch.Tensor) or _same_tensors(first, second)
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        return isinstance(second, np.ndarray) and np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
    if isinstance(first, (int, float, complex, np.number)):
        return bool(first == second or (first != first and second != second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return all(_steady(first[key], second[key]) for key in first if key in second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_steady, first, second))
    return True


def _gist(sample: Any) -> Any:
    """Plain values that tell samples apart, and are the same on machines that round in other ways."""
    if isinstance(sample, torch.Tensor):
        try:
            return _gist(sample.detach().cpu().resolve_conj().resolve_neg().numpy())
        except (TypeError, RuntimeError):  # Of a kind that numpy does not have.
            return [str(sample.dtype), list(sample.shape)]
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "biu":
        return [
            sample.shape,
            int(sample.astype(np.int64).ravel()[:_GIST].dot(np.arange(1, 1 + min(sample.size, _GIST)))),
        ]
    if isinstance(sample, np.ndarray) and sample.dtype.kind in "fc":
        return [sample.shape, f"{float(np.nan_to_num(abs(sample.astype(np.complex128))).sum()):.1e}"]
    if isinstance(sample, str):
        return None if "/" in sample else sample  # Where files are may differ.
    if isinstance(sample, (bool, int, np.integer, np.bool_)):
        return int(sample)
    if isinstance(sample, (float, np.floating)):
        return f"{sample:.1e}"
    if isinstance(sample, Mapping):
        return [[str(key), _gist(value)] for key, value in sample.items()]
    if isinstance(sample, (list, tuple)):
        return [_gist(one) for one in sample]
    return None


def _same_tensors(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.layout != torch.strided or first.is_quantized or first.shape != second.shape:
        return first.shape == second.shape
    if first.dtype.is_floating_point or first.dtype.is_complex:
        return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(first, second)


class _Init:
    """What a reader does first: what the script wants, and that it does not outlive its worker. It holds copies of
    the worker's sockets: peers would notice the worker's end late."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self.given = given

    def __call__(self, number: int) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)
        if self.given is not None:
            self.given(number)
