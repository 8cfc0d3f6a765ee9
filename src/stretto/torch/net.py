"""Are the replicas still the same? Compared bit by bit while they train: no job ends with several models for one.

Parameters, what optimizers and their groups hold, schedulers, the scaler, kept parts and saved buffers must agree on
all members after every step. A checksum of them is exchanged now and then: the leader of the moment asks for it, with
the flags of a step, so often that it takes less than half a percent of the time, at least every 200 steps; in the
first steps of a generation, before somebody leaves and at the end of a loop it is always compared. If it differs, all
members learn in what, and end with an error that names it.

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
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

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
_SETTLES = 2
"""Steps of a new generation that are not held up by a comparison, too: in these its state is on its way, and proved."""
WITHIN = 1e-4
"""By norm, between kinds of hardware."""
_SMALL = 1 << 12
"""Elements: tensors of fewer are put together first."""
_WIDTH = 1023
"""Words in a row. Odd, so that a highest bit that changes everywhere changes in the sum of a row."""
_ROWS = 32
"""So many are added up at a time, on CPUs: they stay in the cache between the two sums."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
OWN = (_NormBase, _SpectralNorm)
"""Modules whose buffers are each worker's own."""


class Difference(NamedTuple):
    """Found by a comparison."""

    names: tuple[str, ...]
    """Of what differs."""
    since: int
    """Applied steps at the last comparison that found nothing."""


class Seldom:
    """When to do again what takes time: after so many times, or as soon as it took less than a share of the time."""

    def __init__(self, share: float, most: int, clock: Callable[[], float]) -> None:
        self._share, self._most, self._clock = share, most, clock
        self._since_s = clock()
        self._took_s = 0.0
        self._asked = 0

    def due(self) -> bool:
        self._asked += 1
        if self._asked < self._most and self._took_s > self._share * (self._clock() - self._since_s):
            return False
        self._asked, self._took_s, self._since_s = 0, 0.0, self._clock()
        return True

    def timed(self, act: Callable[[], T]) -> T:
        began_s = self._clock()
        found = act()
        self._took_s += self._clock() - began_s
        return found


class _Noted(NamedTuple):
    """What one member holds."""

    total: int
    by_name: dict[str, int]
    lengths: dict[str, float]


class Net:
    """Of one member. `wanted` before a step, `compare` after it wherever all members do. Whoever leaves a loop by
    itself does not know who else does: it notes what it holds, and compares that when all have left."""

    def __init__(self, holder: Holder, *, bitwise: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.holder, self.bitwise, self._clock = holder, bitwise, clock
        self.local: dict[int, list[str]] = {}
        """By model: names, or patterns of names, of what need not agree."""
        self.local_parts: set[str] = set()
        """Names of kept parts that need not."""
        self._generation = 0
        self._period = 1
        self._steps = 0
        """Since the last comparison."""
        self._entered, self._in_generation = 0, 0
        """The generation under way, and the steps in it."""
        self._began_s = 0.0
        self._agreed = 0
        self.stepped = False
        """Whether anybody, as far as this member knows, has stepped since the last comparison."""
        self._left: tuple[int, int, _Noted] | None = None
        """The generation and the applied steps in which the script left its loop, and what it held."""

    def wanted(self, generation: int) -> bool:
        """Whether this member, as the leader, would compare after the next step."""
        if generation != self._entered:
            self._entered, self._in_generation = generation, 0
        if generation != self._generation:
            soon = self._generation and self._in_generation < _SETTLES
            return not soon or self._steps + 1 >= MOST_STEPS
        return self._steps + 1 >= self._period

    def passed(self) -> None:
        """A step was applied, and nothing was compared."""
        self._steps += 1
        self._in_generation += 1

    def compare(self, group: Group, applied: int) -> Difference | None:
        """Called by all members after the same step. Raises `GroupBroken`."""
        now_s = self._clock()
        step_s = (now_s - self._began_s) / (self._steps + 1)
        pieces = self._pieces()
        kinds, sums = _exchanged(group, checksum(pieces))
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

    def _pieces(self) -> list[tuple[str, Piece]]:
        return list(named(self.holder, self.local, bitwise=self.bitwise, apart=self.local_parts))

    def leave(self, generation: int, applied: int) -> None:
        """The script leaves its loop."""
        pieces = self._pieces()
        noted = _Noted(checksum(pieces), _by_name(pieces, checksum), _by_name(pieces, lengths))
        self._left = generation, applied, noted

    def compare_left(self, group: Group | None) -> tuple[Difference, int] | None:
        """Called by all members when all have left their loop; with the applied steps. Raises `GroupBroken`."""
        left, self._left = self._left, None
        if left is None or group is None or group.size == 1 or group.generation != left[0]:
            return None
        _, applied, noted = left
        kinds, sums = _exchanged(group, noted.total)
        names: tuple[str, ...] = ()
        if len(set(kinds)) > 1:
            names = _different(group, noted.lengths, _close)
        elif len(set(sums)) > 1:
            names = _different(group, noted.by_name, _equal)
        since, self._agreed = self._agreed, applied
        return (Difference(names, since), applied) if names else None


Piece = Tensor | str
"""A tensor, or anything else in words."""


def named(
    holder: Holder, local: dict[int, list[str]], *, bitwise: bool, apart: Collection[str] = ()
) -> Iterator[tuple[str, Piece]]:
    """Everything that must agree, with a name for people; `apart` are kept parts that need not."""
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
            words, tensors = dismantle({key: value for key, value in group.items() if key != "params"}, sort=True)
            yield f"the options of group {g} of {kind}", words
            for tensor in tensors:
                yield f"the options of group {g} of {kind}", tensor
            for parameter in group["params"]:
                owner = names.get(id(parameter), "a parameter")
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    words, tensors = ("", [value]) if isinstance(value, Tensor) else dismantle(value, sort=True)
                    parts: list[Piece] = [*tensors, words] if words else [*tensors]
                    for part in parts:
                        yield f"{key} of {owner} in {kind}", part
    for helper in holder.helpers():
        yield from _parts(type(helper).__name__, helper.state_dict())
    yield from _kept(holder, apart)


def _kept(holder: Holder, apart: Collection[str] = ()) -> Iterator[tuple[str, Piece]]:
    for name, extra in holder.extras.items():
        if name not in apart:
            yield from _parts(f"the part {name!r}", _without_statistics(extra.state_dict()))


def _without_statistics(state: Any) -> Any:
    """What it has copied of a model with norms is each worker's own, too."""
    if isinstance(state, Mapping):
        return {
            key: _without_statistics(value)
            for key, value in state.items()
            if not (isinstance(key, str) and key.rpartition(".")[2] in _STATISTICS)
        }
    return [_without_statistics(one) for one in state] if isinstance(state, (list, tuple)) else state


def _parts(name: str, state: Any) -> Iterator[tuple[str, Piece]]:
    words, tensors = dismantle(state, sort=True)
    yield name, words
    for tensor in tensors:
        yield name, tensor


def sums(holder: Holder) -> dict[str, int]:
    """Checksums of the parameters and the kept parts, by name."""
    pieces: list[tuple[str, Piece]] = []
    for m, model in enumerate(holder.models):
        prefix = f"{m}." if len(holder.models) > 1 else ""
        pieces += [(f"{prefix}{name}", parameter.detach()) for name, parameter in model.named_parameters()]
    return _by_name([*pieces, *_kept(holder)], checksum)


Sized = tuple[str, tuple[int, ...]]
"""A buffer by its name and its shape: one that grows is another."""


def forward_sums(holder: Holder, local: dict[int, list[str]]) -> dict[Sized, int]:
    """Checksums of the buffers that training may depend on. What norms gather of batches is for evaluation."""
    return {
        (f"{m}.{name}" if len(holder.models) > 1 else name, tuple(buffer.shape)): checksum([(name, buffer)])
        for m, model in enumerate(holder.models)
        for path, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, buffer in _kept_buffers(path, module)
        if not any(fnmatch.fnmatch(name, pattern) for pattern in local.get(m, ()))
    }


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


def statistics(holder: Holder, local: dict[int, list[str]]) -> list[Tensor]:
    """What norms have gathered from the samples of each worker."""
    return [
        buffer
        for m, model in enumerate(holder.models)
        for path, module in model.named_modules()
        if isinstance(module, OWN) and not isinstance(module, nn.SyncBatchNorm)
        for name, buffer in module._buffers.items()
        if buffer is not None and not any(fnmatch.fnmatch(f"{path}.{name}", pattern) for pattern in local.get(m, ()))
    ]


def _saved_buffers(model: nn.Module, *, all_of_them: bool) -> Iterator[tuple[str, Tensor]]:
    """But for the statistics of norms, unless these are alike, too."""
    for path, module in model.named_modules():
        if isinstance(module, OWN) and not isinstance(module, nn.SyncBatchNorm) and not all_of_them:
            continue
        yield from _kept_buffers(path, module)


def _kept_buffers(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of one module that it saves."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name, buffer


@torch.no_grad()
def checksum(pieces: list[tuple[str, Piece]]) -> int:
    """Differs if a single bit does; where more do, but for an accident."""
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
    """Of the sums of its 64-bit words by row and by column, in a table of many columns: what changes few words, or
    their places, changes some of these sums, and then each of them counts by itself."""
    data = value.contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // (8 * _WIDTH) * (8 * _WIDTH)
    table = data[:whole].view(torch.int64).view(-1, _WIDTH)
    rest = torch.zeros(_WIDTH * 8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    columns, rows = rest.view(torch.int64).clone(), []
    for block in torch.split(table, _ROWS) if data.device.type == "cpu" else (table,):
        columns += block.sum(0)
        rows.append(block.sum(1))
    return 3 * _mixed(rest.view(torch.int64)) + 5 * _mixed(columns) + 7 * _mixed(torch.cat(rows)) + data.numel()


def _mixed(words: Tensor) -> Tensor:
    """A sum in which every bit of a word, and its place, changes most bits of what the word adds."""
    factors = (2 * torch.arange(len(words), device=words.device) + 1) * -0x61C8864680B583EB
    found = (words ^ (words >> 31)) * factors
    return ((found ^ (found >> 29)) * -0x40A7B892E31B1A47).sum()


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


def kind_of_machine() -> str:
    """What bits depend on besides the numbers."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return f"{device} {platform.machine()} {torch.get_num_threads()} {torch.__version__}"


def _exchanged(group: Group, total: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """By rank: the kind of machine, and the checksum."""
    own = json.dumps([kind_of_machine(), total]).encode()
    kinds, sums = zip(*(json.loads(one) for one in group.all_gather_bytes(own)), strict=True)
    return kinds, sums


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
