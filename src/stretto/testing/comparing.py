"""Two runs of a script, told apart by the digests that their workers wrote: where they part, by how much, and why.

Pure: records in, values out. Differences are relative by norm. Rounding alone makes runs differ, and in some trainings
it grows from step to step: how much it does is measured by a run on one worker that began with every parameter's last
bit changed (the yardstick). What is allowed of a tensor at a step is what its type allows, or a multiple of what the
yardstick is off there.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]

TOLERANCES = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}
"""By norm; of all shorter types `HALF`."""
HALF, EXACT = 1e-2, 1e-12
OWN_WITHIN = 1e-4
"""Of variables that are no part of the state: by norm, whatever their type."""
ROUNDING = 100.0
"""So many times what the yardstick is off may be rounding, too."""
BLURRED = 0.1
"""Where rounding alone may do so much, a tensor shows nothing any more."""
_FLOOR = 1e-3
"""A tensor much smaller than others of its kind is measured beside them: some gradients are nothing but rounding."""
_OWN_WAY = 0.05
"""Two runs on one worker whose first updates differ by more than this are not runs of the same training."""


class Part(NamedTuple):
    """One tensor, or number, of a record."""

    kind: str
    """`parameter`, `buffer`, `optimizer KEY` or `value`."""
    dtype: str
    numel: int
    values: Values
    """Its digest."""


@dataclass(frozen=True)
class Record:
    """What one worker held after a step."""

    step: int
    rank: int
    worker: str = "w0"
    size: int = 1
    generation: int = 1
    loop: int = 0
    own_start: bool = False
    """It would have begun with other weights than the first run."""
    drawn: tuple[str, ...] = ()
    """Whose random numbers the body took."""
    traits: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    own: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Figures of the script's own variables; at the end of a loop, and of the run."""


Run = Mapping[int, Sequence[Record]]
"""By step; the leader's first."""


class Parting(NamedTuple):
    """The first step at which something is off, and what."""

    step: int
    name: str
    """The first that is, in the order of the model."""
    difference: float
    tensors: int
    """How many are."""
    of: int
    worst: str
    worst_difference: float
    kinds: tuple[str, ...]


class Scale(NamedTuple):
    """The update of one kind of part, beside that of one worker."""

    kind: str
    ratio: float
    cosine: float


@dataclass(frozen=True)
class Comparison:
    """One run beside the reference."""

    steps: int
    """The last step that both have."""
    largest: float
    """Of all differences that were judged."""
    parting: Parting | None
    replicas: Parting | None
    """Where workers of this run part from each other."""
    scales: tuple[Scale, ...]
    """Of the updates of the step at which it parts."""
    blurred: tuple[str, ...]
    """What was not judged to the end: rounding alone does too much there."""
    growth: tuple[tuple[int, float], ...]
    """The largest difference at every step."""


def read(folder: Path) -> dict[int, list[Record]]:
    """All whole records of a run."""
    found: dict[int, list[Record]] = {}
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            record = _record(json.loads(file["meta"].tobytes()), file["values"])
        found.setdefault(record.step, []).append(record)
    for records in found.values():
        records.sort(key=lambda record: (-record.generation, record.rank if record.rank >= 0 else 10**6))
    return dict(sorted(found.items()))


def _record(meta: dict[str, Any], values: Values) -> Record:
    parts: dict[str, Part] = {}
    place = 0
    for name, kind, dtype, count, length in meta.pop("parts"):
        # Names of users' things need not be unique.
        unique = name if name not in parts else f"{name} ({len(parts)})"
        parts[unique] = Part(kind, dtype, count, values[place : place + length])
        place += length
    return Record(**{**meta, "drawn": tuple(meta["drawn"])}, parts=parts)


def forgotten(alone: Run, undisturbed: Sequence[Run], disturbed: Run) -> list[str]:
    """Variables of the script that are alike on all workers as long as nothing happens, and end otherwise in a worker
    that came later: they are no part of the state that it was given."""
    step = max((step for step, records in alone.items() if records[0].own), default=0)
    if not all(step in run for run in (alone, disturbed, *undisturbed)):
        return []
    expected = alone[step][0].own
    return [
        name
        for name, figures in expected.items()
        if all(_alike(figures, record.own.get(name)) for run in undisturbed for record in run[step])
        and not all(_alike(figures, record.own.get(name)) for record in disturbed[step])
    ]


def _alike(figures: Sequence[float], others: Sequence[float] | None) -> bool:
    if others is None or figures[0] != others[0]:
        return False
    size = max(abs(figures[-1]), abs(others[-1]))
    return all(abs(one - other) <= OWN_WITHIN * size for one, other in zip(figures, others, strict=True))


def compare(reference: Run, other: Run, yardstick: Run) -> Comparison:
    """A run beside the undisturbed one on one worker."""
    steps = [step for step in reference if step in other]
    parting: Parting | None = None
    largest = 0.0
    scales: tuple[Scale, ...] = ()
    blurred: dict[str, None] = {}
    growth: list[tuple[int, float]] = []
    for step in steps:
        here, there = reference[step][0], other[step][0]
        noise = distances(here, yardstick[step][0]) if step in yardstick else {}
        found = distances(here, there)
        allowed = {name: max(tolerance(here, name), ROUNDING * noise.get(name, 0.0)) for name in found}
        blurred.update((name, None) for name in found if allowed[name] > BLURRED)
        judged = {name: distance for name, distance in found.items() if name not in blurred}
        at_most = max(judged.values(), default=0.0)
        growth.append((step, at_most))
        largest = max(largest, at_most)
        off = {name: (distance, _kind(here, name)) for name, distance in judged.items() if distance > allowed[name]}
        if off and parting is None:
            parting = _parting(step, off, len(found))
            before = max((earlier for earlier in steps if earlier < step), default=None)
            if before is not None:
                scales = tuple(_scales(reference[before][0], here, other[before][0], there, off))
    return Comparison(
        steps=steps[-1] if steps else 0,
        largest=largest,
        parting=parting,
        replicas=replicas_part(other),
        scales=scales,
        blurred=tuple(blurred),
        growth=tuple(growth),
    )


def _parting(step: int, off: Mapping[str, tuple[float, str]], of: int) -> Parting:
    first = next(iter(off))
    worst = max(off, key=lambda name: off[name][0])
    kinds = tuple(dict.fromkeys(kind for _, kind in off.values()))
    return Parting(step, first, off[first][0], len(off), of, worst, off[worst][0], kinds)


def distances(here: Record, there: Record) -> dict[str, float]:
    """By name, in order; infinite where only one of the two has it, or it is not a number in one of them only."""
    floors = _floors(here)
    found = {
        name: _distance(part, there.parts[name], floors.get(part.kind, 0.0)) if name in there.parts else math.inf
        for name, part in here.parts.items()
    }
    return {**found, **{name: math.inf for name in there.parts if name not in found}}


def _distance(here: Part, there: Part, floor: float) -> float:
    if here.numel != there.numel:
        return math.inf
    if not (np.isfinite(here.values).all() and np.isfinite(there.values).all()):
        return 0.0 if np.array_equal(here.values, there.values, equal_nan=True) else math.inf
    difference = _norm(here.values - there.values)
    scale = max(_norm(here.values), _norm(there.values), floor * math.sqrt(here.numel))
    return difference / scale if difference else 0.0


def _floors(record: Record) -> dict[str, float]:
    """Per value, by kind; numbers and buffers have nothing in common with each other."""
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in record.parts.values():
        if part.kind not in ("buffer", "value") and np.isfinite(part.values).all():
            squares[part.kind] = squares.get(part.kind, 0.0) + _norm(part.values) ** 2
            counts[part.kind] = counts.get(part.kind, 0) + part.numel
    return {kind: _FLOOR * math.sqrt(square / max(counts[kind], 1)) for kind, square in squares.items()}


def tolerance(record: Record, name: str) -> float:
    """By its type; plain numbers come of what the parameters are computed in."""
    part = record.parts.get(name)
    if part is None:
        return 0.0
    if part.kind == "value":
        return max((_allowed(p.dtype) for p in record.parts.values() if p.kind == "parameter"), default=EXACT)
    return _allowed(part.dtype)


def _allowed(dtype: str) -> float:
    if not dtype.startswith(("float", "bfloat", "complex")):
        return EXACT
    return TOLERANCES.get(dtype, HALF)


def replicas_part(run: Run) -> Parting | None:
    """The first step after which workers of one generation hold different things. Buffers may be their own."""
    for step, records in run.items():
        leader = records[0]
        for record in records[1:]:
            if not step or record.generation != leader.generation:
                continue
            found = distances(leader, record)
            off = {
                name: (distance, _kind(leader, name))
                for name, distance in found.items()
                if distance > tolerance(leader, name) / 100 and _kind(leader, name) != "buffer"
            }
            if off:
                return _parting(step, off, len(found))
    return None


def _kind(record: Record, name: str) -> str:
    return record.parts[name].kind if name in record.parts else ""


def goes_its_own_way(reference: Run, yardstick: Run) -> float:
    """How far apart the first updates of two runs on one worker are; 0 if they are those of the same training."""
    steps = [step for step in reference if step in yardstick]
    for before, after in itertools.pairwise(steps):
        here = _update(reference[before][0], reference[after][0], "parameter")
        there = _update(yardstick[before][0], yardstick[after][0], "parameter")
        size = _norm(here)
        if len(here) == len(there) and size and np.isfinite(here).all():
            found = _norm(here - there) / size
            return found if found > _OWN_WAY else 0.0
    return 0.0


def _scales(before: Record, here: Record, other_before: Record, there: Record, off: Iterable[str]) -> Iterator[Scale]:
    """Of parameters and moments that are off: the update, in size and direction, beside that of one worker."""
    for kind in dict.fromkeys(_kind(here, name) for name in off):
        if not kind.startswith(("parameter", "optimizer")):
            continue
        mine, theirs = _update(before, here, kind), _update(other_before, there, kind)
        if len(mine) != len(theirs) or not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
            continue
        product, size, other_size = float(mine @ theirs), _norm(mine), _norm(theirs)
        if size and other_size:
            yield Scale(kind, product / size**2, product / (size * other_size))


def _update(before: Record, after: Record, kind: str) -> Values:
    """What a step changed; what was not there before it was zero."""
    changes = [
        part.values - before.parts[name].values if name in before.parts else part.values
        for name, part in after.parts.items()
        if part.kind == kind and (name not in before.parts or before.parts[name].numel == part.numel)
    ]
    return np.concatenate(changes) if changes else np.zeros(0)


def _norm(values: Values) -> float:
    return float(np.linalg.norm(values))


@dataclass(frozen=True)
class Case:
    """A run that was compared, for `causes`."""

    workers: int
    disturbed: bool
    comparison: Comparison


def causes(reference: Run, cases: Sequence[Case]) -> list[str]:
    """What usually makes runs part in this way, the likeliest first."""
    parted = [case for case in cases if case.comparison.parting is not None]
    if not parted:
        return []
    calm = [case for case in parted if not case.disturbed]
    found = [*_sum_loss(calm), *_randomness(reference), *_normalisation(reference), *_replicas(parted)]
    if not calm and any(not case.disturbed for case in cases):
        return [*found, _ONLY_DISTURBED]
    kinds = {kind for case in parted if case.comparison.parting for kind in case.comparison.parting.kinds}
    if kinds == {"buffer"}:
        return [*found, _BUFFERS]
    return found or [_SLICES]


_ONLY_DISTURBED = (
    "only the disturbed run differs: something that the script relies on is not part of the job's state (a counter, "
    "an average or a list of its own: register it with job.keep), or its body changes something each time it runs "
    "(a batch is done again after a loss, and a newcomer rehearses)"
)
_BUFFERS = (
    "only buffers differ: the model keeps statistics of the samples that it is given, and those of a worker are a "
    "slice of the batch"
)
_SLICES = (
    "the workers agree with each other, and not with one worker: the loss is not a mean over the samples that it was "
    "given (say what it is a mean over with weight=), compares samples of a batch with each other (each worker sees "
    "its slice only), or the body uses job.rank, job.size or the length of its slice"
)


def _sum_loss(calm: Sequence[Case]) -> Iterator[str]:
    """A sum over slices, weighed by their shares, is the n-th part of the sum over the batch."""
    seen: list[str] = []
    for case in calm:
        for scale in case.comparison.scales:
            if case.workers > 1 and scale.cosine > 0.98 and abs(scale.ratio * case.workers - 1) < 0.05:
                seen.append(f"{scale.ratio:.2f} on {case.workers}")
                break
    if seen:
        yield (
            f"an update is {', '.join(seen)} workers of what it is on one: the loss is a sum, or a sum divided by the "
            "global size; make it a mean over the samples that the body was given (batch.x), and the runtime weighs "
            "the slices"
        )


def _randomness(reference: Run) -> Iterator[str]:
    drawn = sorted({name for records in reference.values() for record in records for name in record.drawn})
    dropout = _trait(reference, "dropout")
    if any(name.startswith("torch") for name in drawn):
        where = f"dropout ({_listed(dropout)}) or torch.rand" if dropout else "torch.rand or the like"
        yield (
            f"the body draws random numbers of torch ({where}): they are drawn for a slice, so they depend on the "
            'number of workers; with consistency="bitwise" they do not, nor in the dataset'
        )
    others = [name for name in drawn if not name.startswith("torch")]
    if others:
        yield (
            f"the body draws from {' and '.join(others)}: seed it alike on all workers, and draw per step, "
            "not per sample; draw what belongs to a sample in the dataset"
        )


def _normalisation(reference: Run) -> Iterator[str]:
    names = _trait(reference, "batch_norm")
    if names:
        yield (
            f"BatchNorm ({_listed(names)}) normalises each slice by itself: use GroupNorm or LayerNorm, or "
            'consistency="bitwise", or accept it'
        )


def _replicas(parted: Sequence[Case]) -> Iterator[str]:
    for case in parted:
        found = case.comparison.replicas
        if found is None:
            continue
        told = f"the workers differ from each other after step {found.step}, in {found.name}: "
        if found.kinds == ("value",):
            yield told + "each gives a scheduler or its options a number of its own, such as the loss of its slice"
        else:
            yield told + (
                "each decides by something of its own (the loss of its slice, job.rank, a random number, a counter), "
                "or changes something that was not registered (job.model, job.optimizer)"
            )
        return


def _trait(reference: Run, name: str) -> list[str]:
    return list(dict.fromkeys(n for records in reference.values() for r in records for n in r.traits.get(name, ())))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
