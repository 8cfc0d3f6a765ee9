"""Are the replicas still the same? Compared bit by bit while they train: no job ends with several models for one.

Parameters, what optimizers and their groups hold, schedulers, the scaler and saved buffers must agree on all members
after every step. A checksum of them is exchanged now and then: the leader of the moment asks for it, with the flags of
a step, so often that it takes less than half a percent of the time, at least every 200 steps; after the first step of a
generation, before a planned switch and at the end of a loop it is always compared. If it differs, all members learn in
what, and end with an error that names it.

Bits are compared on one kind of hardware only. Where members differ in that, lengths of vectors have to agree.
Statistics of BatchNorm are each worker's own outside of bitwise mode, and so is what the script says
(`Job.model(…, local=[names])`) and what a model does not save.
"""

from __future__ import annotations

import fnmatch
import json
import math
import platform
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from stretto.torch.groups import Group
from stretto.torch.state import Holder, dismantle

T = TypeVar("T")

SHARE = 0.005
"""Of the time, for comparisons."""
MOST_STEPS = 200
WITHIN = 1e-4
"""By norm, between kinds of hardware."""
_SMALL = 1 << 12
"""Elements: tensors of fewer are put together first."""
_WIDTH = 1 << 10
_CPU = torch.device("cpu")
_ODD = {_CPU: torch.from_numpy(np.random.default_rng(0x5747E770).integers(-(2**62), 2**62, _WIDTH) * 2 + 1)}
"""By device: where a word stands matters as well as what it is."""
_OWN = (_NormBase, _SpectralNorm)
"""Modules whose buffers are each worker's own."""


class Difference(NamedTuple):
    """Found by a comparison."""

    names: tuple[str, ...]
    """Of what differs."""
    since: int
    """Applied steps at the last comparison that found nothing."""


class Net:
    """Of one member. `wanted` before a step, `compare` after it wherever all members do."""

    def __init__(self, holder: Holder, *, bitwise: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.holder, self.bitwise, self._clock = holder, bitwise, clock
        self.local: dict[int, list[str]] = {}
        """By model: names, or patterns of names, of what need not agree."""
        self._generation = 0
        self._period = 1
        self._steps = 0
        """Since the last comparison."""
        self._began_s = 0.0
        self._agreed = 0
        self.stepped = False
        """Whether anybody, as all know, has stepped since the last comparison."""

    def wanted(self, generation: int) -> bool:
        """Whether this member, as the leader, would compare after the next step."""
        return generation != self._generation or self._steps + 1 >= self._period

    def passed(self) -> None:
        """A step was applied, and nothing was compared."""
        self._steps += 1

    def compare(self, group: Group, applied: int) -> Difference | None:
        """Called by all members after the same step. Raises `GroupBroken`."""
        now_s = self._clock()
        step_s = (now_s - self._began_s) / (self._steps + 1)
        pieces = list(named(self.holder, self.local, bitwise=self.bitwise))
        told = [json.loads(one) for one in group.all_gather_bytes(json.dumps([_kind(), checksum(pieces)]).encode())]
        kinds, sums = zip(*told, strict=True)
        names: tuple[str, ...] = ()
        if len(set(kinds)) > 1:
            names = _different(group, _by_name(pieces, lengths), _close)
        elif len(set(sums)) > 1:
            names = _different(group, _by_name(pieces, checksum), _equal)
        difference = Difference(names, self._agreed) if names else None
        self._began_s = self._clock()
        known = group.generation == self._generation
        self._generation, self._agreed = group.generation, applied
        # The first steps of a generation say little of how long a step takes.
        cost = (self._began_s - now_s) / (SHARE * step_s) if known and step_s > 0 else 2 * self._period
        self._period = max(1, min(MOST_STEPS, math.ceil(cost)))
        self._steps, self.stepped = 0, False
        return difference


Piece = Tensor | str
"""A tensor, or anything else in words."""


def named(holder: Holder, local: dict[int, list[str]], *, bitwise: bool) -> Iterator[tuple[str, Piece]]:
    """Everything that must agree, with a name for people."""
    names: dict[int, str] = {}
    for m, model in enumerate(holder.models):
        prefix = f"{m}." if len(holder.models) > 1 else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{prefix}{name}")
        for name, value in [*model.named_parameters(), *_saved_buffers(model, all_of_them=bitwise)]:
            if not any(fnmatch.fnmatch(name, pattern) for pattern in local.get(m, ())):
                yield f"{prefix}{name}", value.detach()
    for optimizer in holder.optimizers:
        kind = type(optimizer).__name__
        for g, group in enumerate(optimizer.param_groups):
            words, tensors = dismantle({key: value for key, value in group.items() if key != "params"})
            yield f"the options of group {g} of {kind}", words
            for tensor in tensors:
                yield f"the options of group {g} of {kind}", tensor
            for parameter in group["params"]:
                owner = names.get(id(parameter), "a parameter")
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    words, tensors = ("", [value]) if isinstance(value, Tensor) else dismantle(value)
                    parts: list[Piece] = [*tensors, words] if words else [*tensors]
                    for part in parts:
                        yield f"{key} of {owner} in {kind}", part
    for helper in holder.helpers():
        words, tensors = dismantle(helper.state_dict())
        yield type(helper).__name__, words
        for tensor in tensors:
            yield type(helper).__name__, tensor


def sums(holder: Holder) -> dict[str, int]:
    """Checksums of the parameters and the kept parts, by name."""
    pieces: list[tuple[str, Piece]] = []
    for m, model in enumerate(holder.models):
        prefix = f"{m}." if len(holder.models) > 1 else ""
        pieces += [(f"{prefix}{name}", parameter.detach()) for name, parameter in model.named_parameters()]
    for name, extra in holder.extras.items():
        words, tensors = dismantle(extra.state_dict())
        pieces.append((f"the part {name!r}", words))
        pieces += [(f"the part {name!r}", tensor) for tensor in tensors]
    return _by_name(pieces, checksum)


class Options:
    """What the groups of all optimizers say, from pass to pass of one step. Every pass may set it to what the step is
    to have; moved on by every pass, it would depend on the number of passes."""

    def __init__(self, holder: Holder) -> None:
        self._holder = holder
        self._found = self._look()
        self._set: set[tuple[int, int, str]] = set()
        """What a pass of this step has changed."""

    def moved(self, *, last: bool) -> list[str]:
        """After a pass: what it changed, and one before it, too. In the last one schedulers step."""
        before, self._found = self._found, self._look()
        changed = {place for place, value in self._found.items() if value != before.get(place)}
        again = sorted(changed & self._set)
        self._set |= changed
        return [] if last and self._holder.helpers() else [self._name(*place) for place in again]

    def _look(self) -> dict[tuple[int, int, str], Any]:
        return {
            (o, g, key): value.tolist() if isinstance(value, Tensor) else value
            for o, optimizer in enumerate(self._holder.optimizers)
            for g, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params"
        }

    def _name(self, optimizer: int, group: int, key: str) -> str:
        return f"{key} of group {group} of {type(self._holder.optimizers[optimizer]).__name__}"


def _saved_buffers(model: nn.Module, *, all_of_them: bool) -> Iterator[tuple[str, Tensor]]:
    """But for the statistics of norms, unless these are alike, too."""
    for path, module in model.named_modules():
        if isinstance(module, _OWN) and not isinstance(module, nn.SyncBatchNorm) and not all_of_them:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


@torch.no_grad()
def checksum(pieces: list[tuple[str, Piece]]) -> int:
    """Differs, but for an accident of 1 in 2**64, if a single bit does."""
    found = 0
    packs: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sums: dict[torch.device, list[Tensor]] = {}
    for place, (_, value) in enumerate(pieces):
        # All factors are odd: of an even one's product the highest bits would be lost.
        if isinstance(value, str):
            found += (2 * place + 1) * zlib.crc32(value.encode())
        elif value.layout != torch.strided or not value.numel():
            found += 2 * place + 1
        elif value.numel() < _SMALL:
            packs.setdefault((value.dtype, value.device), []).append(value.reshape(-1))
        else:
            sums.setdefault(value.device, []).append(_of_words(value))
    for pack in packs.values():
        whole = torch.cat(pack)
        sums.setdefault(whole.device, []).append(_of_words(whole))
    for some in sums.values():
        # Read together: each reading waits for the device.
        for place, part in enumerate(torch.stack(some).tolist()):
            found = 0x9E3779B97F4A7C15 * found + (2 * place + 1) * part
    return found & (2**64 - 1)


def _of_words(value: Tensor) -> Tensor:
    """A sum of its 64-bit words, each with an odd factor of its place in a row of many."""
    data = value.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    odd = _ODD.setdefault(data.device, _ODD[_CPU].to(data.device))
    whole = data.numel() // (8 * _WIDTH) * (8 * _WIDTH)
    found = torch.zeros((), dtype=torch.int64, device=data.device)
    if whole:
        found = (data[:whole].view(torch.int64).view(-1, _WIDTH).sum(0) * odd).sum()
    if rest := data.numel() - whole:
        # Few enough to be put into one row of their own.
        row = torch.zeros(_WIDTH * 8, dtype=torch.uint8, device=data.device)
        row[:rest] = data[whole:]
        found = 5 * found + 3 * (row.view(torch.int64) * odd).sum() + rest
    return found


def lengths(pieces: list[tuple[str, Piece]]) -> float:
    """Of all their tensors together."""
    tensors = [value.double().reshape(-1) for _, value in pieces if isinstance(value, Tensor) and value.numel()]
    return math.sqrt(sum(float(torch.linalg.vector_norm(one)) ** 2 for one in tensors))


def _by_name(pieces: list[tuple[str, Piece]], figure: Callable[[list[tuple[str, Piece]]], T]) -> dict[str, T]:
    """Pieces of one name count together."""
    together: dict[str, list[tuple[str, Piece]]] = {}
    for name, value in pieces:
        together.setdefault(name, []).append((name, value))
    return {name: figure(some) for name, some in together.items()}


def _kind() -> str:
    """What bits depend on besides the numbers."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return f"{device} {platform.machine()} {torch.get_num_threads()} {torch.__version__}"


def _different(group: Group, own: dict[str, T], same: Callable[[T | None, T | None], bool]) -> tuple[str, ...]:
    """The names under which members have different things."""
    told = [json.loads(one) for one in group.all_gather_bytes(json.dumps(own).encode())]
    everything = dict.fromkeys(name for one in told for name in one)
    return tuple(name for name in everything if not all(same(told[0].get(name), one.get(name)) for one in told))


def _equal(one: object, other: object) -> bool:
    return one == other


def _close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= WITHIN * max(abs(one), abs(other)) or (math.isnan(one) and math.isnan(other))
