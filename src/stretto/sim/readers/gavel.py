"""Gavel's traces (stanford-futuredata/gavel): tab-separated, ten columns, no header.

Job type, command, working directory, name of the steps argument, whether it needs a data folder, total steps,
scale factor (GPUs), priority weight, deadline as a multiple of the job's duration (negative: none), arrival.
Jobs are rigid. What a job type does per second on so many GPUs of each device type comes from a JSON file of
measurements, so a trace has one pool per device type, the fastest first.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray
from stretto.errors import TraceError
from stretto.sim import files
from stretto.sim.trace import Trace

_MEASURED = Path(__file__).parent.parent / "data" / "gavel_throughputs.json"

_COLUMNS = (
    "job type", "command", "working directory", "steps argument", "needs data", "total steps", "scale factor",
    "priority weight", "SLO", "arrival",
)  # fmt: skip

Kind: TypeAlias = tuple[str, int]
"""Job type and scale factor."""

Speeds: TypeAlias = dict[str, dict[Kind, float]]
"""Device type → kind of job → steps/s."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    throughputs: str = ""
    """A JSON file in the format of Gavel's own; empty: the simulation throughputs that come with the package."""


def read(path: Path, options: Options) -> Trace:
    """Read a trace; ids are row numbers."""
    lines = _lines(path)
    rows = [row for row, _ in lines]
    kinds = [(cells[0], _whole(path, row, cells, 6)) for row, cells in lines]
    steps = [_number(path, row, cells, 5) for row, cells in lines]
    arrival = [_number(path, row, cells, 9) for row, cells in lines]
    slo = [_number(path, row, cells, 8) for row, cells in lines]
    weight = [_whole(path, row, cells, 7) for row, cells in lines]
    speeds = load_speeds(Path(options.throughputs) if options.throughputs else _MEASURED)
    pools = tuple(speeds)
    best = [_best(path, row, kind, speeds) for row, kind in zip(rows, kinds, strict=True)]
    duration = [work / rate for work, rate in zip(steps, best, strict=True)]
    table = sorted(set(kinds))
    return Trace.build(
        path.stem,
        [str(row) for row in rows],
        arrival,
        [gpus for _, gpus in kinds],
        duration,
        rows=rows,
        work=steps,
        curve=[table.index(kind) for kind in kinds],
        rates=_rates(table, speeds),
        pools=pools,
        deadline_s=[a + s * d if s >= 0 else math.inf for a, s, d in zip(arrival, slo, duration, strict=True)],
        priority=weight,
        classes=[name for name, _ in kinds],
    )


def load_speeds(path: Path) -> Speeds:
    """Steps/s of each kind of job alone on its GPUs, by device type, the fastest type first."""
    files.check(path, "throughputs file", hint="give the path of a JSON file")
    try:
        raw: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
        found = {
            device: {_kind(key): float(entry["null"]) for key, entry in entries.items()}
            for device, entries in raw.items()
            if not device.endswith("_unconsolidated")
        }
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise TraceError(
            f"throughputs {path.name!r} cannot be read: {type(error).__name__}: {error}",
            hint="""it must look like {"v100": {"('ResNet-18 (batch size 16)', 1)": {"null": 32.4}}}""",
        ) from None
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def _kind(key: str) -> Kind:
    name, gpus = ast.literal_eval(key)
    return str(name), int(gpus)


def _rates(table: list[Kind], speeds: Speeds) -> FloatArray:
    """[pool, kind, workers]: nothing below the scale factor, the measured speed from it on."""
    workers = np.arange(max((gpus for _, gpus in table), default=0) + 1)
    return np.array(
        [[np.where(workers >= kind[1], by.get(kind, 0.0), 0.0) for kind in table] for by in speeds.values()]
    )


def _best(path: Path, row: int, kind: Kind, speeds: Speeds) -> float:
    best = max((by.get(kind, 0.0) for by in speeds.values()), default=0.0)
    if best > 0:
        return best
    have = sorted({f"{name} on {gpus}" for by in speeds.values() for name, gpus in by})
    raise _error(path, row, f"no throughput for {kind[0]!r} on {kind[1]} GPUs", f"known: {', '.join(have)}")


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"trace {path.name!r} is not a text file: {error}", hint="check the file") from None
    lines = [(row, line.split("\t")) for row, line in enumerate(text.splitlines(), 1) if line.strip()]
    for row, cells in lines:
        if len(cells) != len(_COLUMNS):
            hint = f"the columns, separated by tabs, are {', '.join(_COLUMNS)}"
            raise _error(path, row, f"{len(cells)} columns instead of {len(_COLUMNS)}", hint)
    return lines


def _number(path: Path, row: int, cells: list[str], column: int) -> float:
    try:
        value = float(cells[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _error(path, row, f"{_COLUMNS[column]} is {cells[column]!r}", "it must be a finite number")
    return value


def _whole(path: Path, row: int, cells: list[str], column: int) -> int:
    value = _number(path, row, cells, column)
    if value != int(value):
        raise _error(path, row, f"{_COLUMNS[column]} is {cells[column]!r}", "it must be a whole number")
    return int(value)


def _error(path: Path, row: int, what: str, hint: str) -> TraceError:
    return TraceError(f"trace {path.name!r}, row {row}: {what}", hint=hint)
