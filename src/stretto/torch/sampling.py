"""Whose data a loop goes through, and in which order: a dataset, a map-style `DataLoader` taken apart, samplers.

A sampler gives the *global* order. It runs on every worker, with all random generators seeded by (seed, epoch), so that
all find the same; that they did is compared while they train (`Plan.sign`). Generators of its own are found and seeded
too, as far as they can be reached from it. What draws another order when it is asked again is refused at once, alone
as well as among others.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from stretto.errors import UsageError
from stretto.runtime.order import Drawn, Loop, order_seed
from stretto.torch import checks
from stretto.torch.seeding import generators, own_randomness, reseed, seed_all

_FIXED = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, list, tuple, range)
"""Exactly of these types: every epoch has as many samples as they say, and what they give has no history."""
_DEPTH = 4
"""How far samplers are looked into."""


class Source(NamedTuple):
    """What `batches()` was given, sorted."""

    dataset: Dataset[Any]
    samples: int
    size: int | None
    """Samples of a global batch; None where a batch sampler makes the batches."""
    order: Iterable[Any] | None
    """The sampler, or the batch sampler; None: we decide."""
    shuffle: bool
    drop_last: bool
    reading: Mapping[str, Any]
    """How samples are read."""

    def loop(self, *, epochs: int, seed: int, accumulate: int) -> Loop | Drawn:
        if self.order is None:
            assert self.size is not None
            return Loop(
                samples=self.samples,
                size=self.size * accumulate,
                epochs=epochs,
                seed=seed,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
            )
        fixed = type(self.order) in _FIXED and self.size is not None
        return Drawn(
            Draw(self.order, self.dataset, seed, sets_epoch=epochs > 1),
            samples=self.samples,
            batch=self.size,
            epochs=epochs,
            seed=seed,
            drop_last=self.drop_last,
            accumulate=accumulate,
            length=len(self.order) if fixed else None,  # type: ignore[arg-type]
            who=type(self.order).__name__,
        )


def source(
    given: Dataset[Any] | DataLoader[Any],
    *,
    size: int | None,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    shuffle: bool | None,
    drop_last: bool,
    workers: int | None,
    pin_memory: bool | None,
    collate: Callable[[list[Any]], Any] | None,
) -> Source:
    """What a `batches()` call goes through; raises what does not go together."""
    if isinstance(given, DataLoader):
        dataset, ours = _apart(given, size, sampler, batch_sampler, shuffle)
        size, sampler, batch_sampler, shuffle = ours.size, ours.sampler, ours.batch_sampler, ours.shuffle
        drop_last |= ours.drop_last
        reading = {
            "workers": given.num_workers if workers is None else workers,
            "pin_memory": given.pin_memory if pin_memory is None else pin_memory,
            "collate": collate or given.collate_fn,
            "prefetch": given.prefetch_factor or 2,
            "init": given.worker_init_fn,
            "context": given.multiprocessing_context,
            "timeout_s": given.timeout,
        }
    else:
        dataset = given
        reading = {"workers": workers or 0, "pin_memory": bool(pin_memory), "collate": collate}
    samples = checks.length(dataset)
    for order in (sampler, batch_sampler):
        _refuse_slices(order)
    if type(batch_sampler) is BatchSampler and sampler is None and size is None and shuffle is None:
        # What it does is what we do, without lists of lists.
        sampler, size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, drop_last or batch_sampler.drop_last
        batch_sampler = None
    _check_order(sampler, batch_sampler, size, shuffle, drop_last)
    if not samples:
        raise UsageError("the dataset has no samples", hint="go through it only `if len(dataset):`")
    if sampler is None and batch_sampler is None and samples and size is not None and samples < size:
        raise UsageError(
            f"the dataset has {samples} samples, a global batch {size}",
            hint=f"use size={samples} or less, or more data",
        )
    order = sampler if sampler is not None else batch_sampler
    order = list(order) if type(order) is list else order  # as it is now
    return Source(dataset, samples, size, order, shuffle is not False, drop_last, reading)


class _Ordering(NamedTuple):
    size: int | None
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    shuffle: bool | None
    drop_last: bool


def _apart(
    loader: DataLoader[Any],
    size: int | None,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    shuffle: bool | None,
) -> tuple[Dataset[Any], _Ordering]:
    """The dataset of a loader, and the order in which it would read it."""
    if sampler is not None or batch_sampler is not None or shuffle is not None:
        raise UsageError(
            "batches() was given a DataLoader and another order beside it",
            hint="give the loader its sampler or shuffle, or give batches() the dataset instead of the loader",
        )
    checks.length(loader.dataset)
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"a {type(loader).__name__} has a way of its own to go through its batches, which batches() would not take",
            hint="give batches() its dataset, and what it does to a batch as collate= or in the body",
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "a DataLoader with batch_size=None makes no batches",
            hint="give it a batch_size, which is that of the global batch, or give batches() its dataset",
        )
    if loader.batch_size is None:
        if size is not None:
            raise UsageError(
                f"size={size}, but the batch_sampler of the loader makes the batches", hint="leave size out"
            )
        return loader.dataset, _Ordering(None, None, loader.batch_sampler, None, False)
    if size is not None and size != loader.batch_size:
        raise UsageError(
            f"size={size}, but the DataLoader has batch_size={loader.batch_size}",
            hint="its batch_size is the size of the global batch: leave size out, or make them equal",
        )
    inner: Any = loader.sampler
    shuffles: bool | None = None
    if isinstance(inner, SequentialSampler) and _is_plain(inner, loader.dataset):
        shuffles = False
    elif isinstance(inner, RandomSampler) and _is_plain(inner, loader.dataset):
        shuffles = True
    given = inner if shuffles is None else None
    return loader.dataset, _Ordering(loader.batch_size, given, None, shuffles, loader.drop_last)


def _is_plain(sampler: Any, dataset: Any) -> bool:
    """All samples of the dataset once, as we give them; not a class of the script's that does something else."""
    if type(sampler) not in (SequentialSampler, RandomSampler) or sampler.data_source is not dataset:
        return False
    return type(sampler) is SequentialSampler or (not sampler.replacement and sampler.num_samples == len(dataset))


def _check_order(
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    size: int | None,
    shuffle: bool | None,
    drop_last: bool,
) -> None:
    if sampler is not None and batch_sampler is not None:
        raise UsageError("batches() was given a sampler and a batch_sampler", hint="give one of them")
    if (sampler is not None or batch_sampler is not None) and shuffle is not None:
        raise UsageError(f"shuffle={shuffle}, but a sampler decides the order", hint="leave shuffle out")
    for given in (sampler, batch_sampler):
        if given is not None and (isinstance(given, Iterator) or not hasattr(given, "__iter__")):
            raise UsageError(
                f"a {type(given).__name__} gives its samples once at most, a sampler for every epoch",
                hint="give an object with __iter__, such as a class of your own or a list",
            )
    if batch_sampler is None and size is None:
        raise UsageError("batches() was not told the size of a global batch", hint="give size=")
    if batch_sampler is not None and size is not None:
        raise UsageError(
            f"size={size}, but the batch_sampler makes the batches", hint="each list that it gives is one global batch"
        )
    if batch_sampler is not None and drop_last:
        raise UsageError(
            "drop_last=True, but the batch_sampler makes the batches", hint="let it leave the last one out"
        )


def _refuse_slices(order: Any) -> None:
    """The order must be that of all workers."""
    for _ in range(_DEPTH):
        if isinstance(order, DistributedSampler) or (hasattr(order, "num_replicas") and hasattr(order, "rank")):
            raise UsageError(
                f"a {type(order).__name__} gives each worker a slice of its own, for a number of workers that is fixed",
                hint="pass the order of all samples, without it (the sampler that it wraps, or nothing at all "
                "for shuffle=True): batches() cuts every global batch for whoever trains at that step",
            )
        order = getattr(order, "sampler", None)


class Draw:
    """A sampler, asked for the order of an epoch as if it were the only thing that draws random numbers."""

    def __init__(self, order: Iterable[Any], dataset: Dataset[Any], seed: int, *, sets_epoch: bool) -> None:
        self.order, self.dataset, self.seed = order, dataset, seed
        self._sets_epoch = sets_epoch
        """A loop of one epoch leaves the sampler in that which the script has set."""
        self._checked = type(order) in _FIXED

    def __call__(self, epoch: int) -> list[Any]:
        before = None if self._checked else self._again(epoch)
        found = self._run(self.order, epoch)
        if before is not None and before != _plain(found):
            raise self._unsteady()
        self._checked = True
        return found

    def _run(self, order: Iterable[Any], epoch: int) -> list[Any]:
        with own_randomness():
            seed = order_seed(self.seed, epoch)
            seed_all(seed)
            for number, generator in enumerate(generators(order, apart=self.dataset)):
                reseed(generator, seed + number + 1)
            if self._sets_epoch:
                set_epoch(order, epoch)
            return list(order)

    def _again(self, epoch: int) -> list[Any] | None:
        """What a copy of it gives. A sampler that was used in an earlier loop must not depend on that: a worker that
        comes later has not been there. None where it cannot be copied."""
        used = _used_before(self.order)
        if used > 1:
            return None
        try:
            double = copy.deepcopy(self.order, {id(part): part for part in _datasets(self.order, self.dataset)})
        except Exception:
            return None
        found = _plain(self._run(double, epoch))
        if used and _plain(self._run(double, epoch)) != found:
            raise self._unsteady()
        return found

    def _unsteady(self) -> checks.TrainingError:
        return checks.TrainingError(
            f"the {type(self.order).__name__} gives another order when it is asked again for the same epoch, so that "
            "workers would not agree",
            hint="take its random numbers from random, numpy.random or torch, which are seeded by (seed, epoch), what "
            "depends on the epoch from set_epoch(), and change nothing in place that it uses again",
        )


_uses: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _used_before(order: Any) -> int:
    """In how many loops; counts this one."""
    try:
        used = _uses.get(order, 0)
        _uses[order] = used + 1
    except TypeError:
        return 0
    return used


def set_epoch(order: Any, epoch: int) -> None:
    """Tell it, and the samplers in it, which epoch begins."""
    for _ in range(_DEPTH):
        if callable(getattr(order, "set_epoch", None)):
            order.set_epoch(epoch)
        order = getattr(order, "sampler", None)


def _datasets(order: Any, dataset: Dataset[Any]) -> list[Any]:
    """What a copy of a sampler shares with it."""
    found: list[Any] = [dataset]
    for _ in range(_DEPTH):
        found += [part for part in getattr(order, "__dict__", {}).values() if isinstance(part, Dataset)]
        order = getattr(order, "sampler", None)
    return found


def _plain(order: Iterable[Any]) -> list[Any]:
    """To be compared: indices may be tensors or arrays."""
    whole = [one.tolist() if hasattr(one, "tolist") else one for one in order]
    return [_plain(one) if isinstance(one, (list, tuple)) else one for one in whole]
