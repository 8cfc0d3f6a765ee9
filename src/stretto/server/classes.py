"""What was learned of a class, for people: how long its jobs ran, by hyper-parameters, and how fast on which sizes.

A middle is a median, and a spread the standard deviation of the logarithm: 0.1 is about ten per cent either way.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import numpy as np

from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.server.estimates import Known
from stretto.server.lengths import Ended


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Some ended jobs together."""

    runs: int
    seconds: float | None
    """The middle of the seconds on the minimum of workers."""
    spread: float | None
    steps: float | None
    """The middle; None: they did not tell."""


class ClassSummary(Runs, frozen=True, kw_only=True):
    name: str
    last_s: float | None
    """When the latest of them was submitted."""
    devices: tuple[str, ...]
    """Types on which its speed was measured."""


class Variant(Runs, frozen=True, kw_only=True):
    """Those with the same hyper-parameters."""

    hyperparameters: dict[str, float | str]


class Size(msgspec.Struct, frozen=True, kw_only=True):
    workers: int
    rate: float
    """Steps per second."""


class Speeds(msgspec.Struct, frozen=True, kw_only=True):
    """On one type of devices, at the sizes that were seen."""

    device: str
    sizes: list[Size]


class Class(ClassSummary, frozen=True, kw_only=True):
    variants: list[Variant]
    """The most frequent first."""
    speeds: list[Speeds]


def summary(name: str, known: Known) -> ClassSummary:
    last_s = max((run.submit_s for run in known.ended), default=None)
    devices = tuple(sorted(pool for pool, history in known.curves.items() if history.curve.workers))
    runs = _together(known.ended)
    return ClassSummary(**msgspec.structs.asdict(runs), name=name, last_s=last_s, devices=devices)


def details(name: str, known: Known) -> Class:
    speeds = [
        Speeds(device=pool, sizes=_sizes(known.curves[pool].curve)) for pool in summary(name, known).devices
    ]  # fmt: skip
    about = msgspec.structs.asdict(summary(name, known))
    return Class(**about, variants=_variants(known.ended), speeds=speeds)


def _together(runs: Sequence[Ended]) -> Runs:
    steps = [run.steps for run in runs if run.steps > 0]
    logs = [math.log(run.size_s) for run in runs if run.size_s > 0]
    return Runs(
        runs=len(runs),
        seconds=math.exp(statistics.median(logs)) if logs else None,
        spread=statistics.stdev(logs) if len(logs) > 1 else None,
        steps=statistics.median(steps) if steps else None,
    )


def _variants(runs: Sequence[Ended]) -> list[Variant]:
    groups: dict[tuple[tuple[str, float | str], ...], list[Ended]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(run.hyperparameters.items())), []).append(run)
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), str(item[0])))
    return [
        Variant(**msgspec.structs.asdict(_together(some)), hyperparameters=dict(which)) for which, some in ranked
    ]  # fmt: skip


def _sizes(curve: Curve) -> list[Size]:
    rates = 1 / curves.step_s(curve, np.array(curve.workers, np.float64))
    return [Size(workers=workers, rate=rate) for workers, rate in zip(curve.workers, rates.tolist(), strict=True)]
