"""Measured scaling curves: iterations/s by model, global batch size and number of GPUs.

A set of curves is a folder with one CSV per model: `global_batch_size,1,2,4,…`. Two sets come with the
package (`A100`, `T4`). Blank, nan or 0 means not measured.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray
from stretto.errors import TraceError, unknown
from stretto.sim.readers import Rows

_DATA = Path(__file__).parent.parent / "data"

Kind: TypeAlias = tuple[str, int]
"""Model and global batch size."""


class Measured(msgspec.Struct, frozen=True):
    """One row: the sizes that were measured, ascending, and iterations/s at each."""

    levels: tuple[int, ...]
    rates: tuple[float, ...]

    def curve(self, falling: bool = False) -> FloatArray:
        """T(n) for n = 0..the smallest level with the highest T, linear between levels, never falling; or as it was
        measured, up to the largest level.
        """
        if falling:
            return np.interp(np.arange(self.levels[-1] + 1), (0, *self.levels), (0.0, *self.rates))
        best = int(np.argmax(self.rates))
        n = np.arange(self.levels[best] + 1)
        line = np.interp(n, (0, *self.levels), (0.0, *self.rates))
        rising: FloatArray = np.maximum.accumulate(line)
        return rising


def load(source: str) -> dict[Kind, Measured]:
    """What was measured of each kind. `source` is `A100`, `T4` or a folder."""
    folder = _DATA / f"throughputs_{source}"
    if source and not folder.is_dir():
        folder = Path(source)
    if not source or not folder.is_dir():
        raise unknown("set of throughputs", source, [p.name.removeprefix("throughputs_") for p in _DATA.glob("thr*")])
    found: dict[Kind, Measured] = {}
    for path in sorted(folder.glob("*.csv")):
        try:
            found |= _measured(path)
        except (OSError, ValueError, IndexError, csv.Error) as error:
            hint = "the first line has numbers of GPUs, each other one a batch size and steps/s"
            raise TraceError(f"throughputs {str(path)!r} cannot be read: {error}", hint=hint) from None
    return found


def _measured(path: Path) -> dict[Kind, Measured]:
    """Of one model, whose name the file has."""
    with path.open(newline="") as file:
        head, *lines = list(csv.reader(file))
    levels = [int(cell) for cell in head[1:]]
    found: dict[Kind, Measured] = {}
    for line in lines:
        cells = [float(cell) if cell.strip() else 0.0 for cell in line[1:]]
        pairs = [(n, t) for n, t in zip(levels, cells, strict=False) if 0 < t < math.inf]
        if not pairs:
            raise TraceError(f"{path.name}: batch {line[0]} has no measurement", hint="remove the line")
        found[path.stem, int(line[0])] = Measured(tuple(n for n, _ in pairs), tuple(t for _, t in pairs))
    return found


def unknown_kind(rows: Rows, kinds: Sequence[Kind], known: Mapping[Kind, Measured], source: str) -> TraceError:
    """The error for a trace with a model or batch size that was not measured."""
    i = next(i for i, kind in enumerate(kinds) if kind not in known)
    model, batch = kinds[i]
    have = ", ".join(f"{model}/{batch}" for model, batch in known)
    return rows.error(i, f"no throughputs for model {model!r} with batch {batch} in {source!r}", f"known: {have}")


def columns(kinds: Sequence[Kind], curves: Mapping[Kind, FloatArray]) -> dict[str, Any]:
    """What `Trace.build` wants to know of elastic jobs: each from one worker to the end of the curve of its kind."""
    used = sorted(set(kinds))
    index = {kind: i for i, kind in enumerate(used)}
    return {
        "curve": [index[kind] for kind in kinds],
        "rates": stack([curves[kind] for kind in used]),
        "min_workers": [1] * len(kinds),
        "max_workers": [len(curves[kind]) - 1 for kind in kinds],
    }


def stack(curves: list[FloatArray]) -> FloatArray:
    """Curves of different lengths as one table [1, curve, workers]; beyond its end a curve stays level."""
    width = max(len(curve) for curve in curves)
    return np.stack([np.pad(curve, (0, width - len(curve)), mode="edge") for curve in curves])[None]
