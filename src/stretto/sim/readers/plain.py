"""The plain CSV format: one job per row, `job_id,submit_s,gpus,duration_s` and what else is known of it.

docs/traces.md is the reference. In short, a job is elastic when it has a `speedup`:

    linear              n workers are n times as fast as one
    0.8                 n workers are n ** 0.8 times as fast
    1:1;2:1.9;4:3.5     measured points: linear between them, level after the last; they may fall

`duration_s` is the time on `gpus` workers, so only the shape of the curve matters; with a `work` column the
points are steps/s and `work` is in steps. A job with a `load` (`0:2;3600:5`) is a service.
The same module writes the format (`rows_of`, `write`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import msgspec
import numpy as np

from stretto.core.request import POWERS_OF_TWO
from stretto.core.snapshot import GPU, FloatArray
from stretto.errors import TraceError
from stretto.sim.readers import NEVER, Rows
from stretto.sim.readers.throughputs import stack
from stretto.sim.trace import LARGEST, LEVELS, UNSAID, Load, Trace

REQUIRED = ("job_id", "submit_s", "gpus", "duration_s")
OPTIONAL = (
    "min", "max", "step", "speedup", "work", "priority", "deadline_s", "class", "gpu_milli",
    "cpu_milli", "memory_mib", "gpu_memory_mib", "load", "level", "start_s", "resize_s", "checkpoint_s", "preemptible",
)  # fmt: skip
_ANSWERS = {"": UNSAID, "true": 1, "yes": 1, "1": 1, "false": 0, "no": 0, "0": 0}


Row: TypeAlias = dict[str, Any]
"""A job as cells by column name; columns that do not apply are left out."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    speedup: str = ""
    """For rows without a speedup of their own; empty: such jobs are rigid."""
    falling: bool = True
    """Keep the part of a curve where more workers are slower; otherwise it stays level from its highest point on."""


def read(path: Path, options: Options) -> Trace:
    """Read a plain trace."""
    rows = Rows(path, REQUIRED)
    strangers = [name for name in rows.header if name and name not in REQUIRED + OPTIONAL]
    if strangers:
        raise TraceError(
            f"trace {rows.name!r}: unknown column {strangers[0]!r}",
            hint=f"columns are {', '.join(REQUIRED)} and optionally {', '.join(OPTIONAL)}",
        )
    submit, asked, duration = rows.floats("submit_s"), rows.ints("gpus"), rows.floats("duration_s")
    jobs = [_Job(rows, i, asked[i], duration[i], options) for i in range(len(rows))]
    kinds = list(dict.fromkeys(job.kind for job in jobs))
    index = {kind: i for i, kind in enumerate(kinds)}
    start = min(submit, default=0.0)
    return Trace.build(
        path.stem,
        rows.text("job_id"),
        submit,
        asked,
        duration,
        rows=rows.numbers,
        work=[job.work for job in jobs],
        curve=[index[job.kind] for job in jobs],
        rates=stack([np.array(kind) for kind in kinds]) if kinds else None,
        min_workers=[job.low for job in jobs],
        max_workers=[job.high for job in jobs],
        deadline_s=_floats(rows, "deadline_s", float("inf")),
        priority=_ints(rows, "priority", 0),
        classes=rows.text("class") if "class" in rows.header else None,
        width_milli=_positive(rows, "gpu_milli", GPU),
        demand=_demand(rows),
        step=[_step(rows, i, text) for i, text in enumerate(rows.text("step"))] if any(rows.text("step")) else None,
        services=[_load(rows, i, text, start) for i, text in enumerate(rows.text("load"))]
        if any(rows.text("load"))
        else (),
        level=_words(rows, "level", {"": UNSAID} | {name: i for i, name in enumerate(LEVELS)}),
        start_s=_seconds(rows, "start_s"),
        resize_s=_seconds(rows, "resize_s"),
        checkpoint_s=_seconds(rows, "checkpoint_s", NEVER),
        preemptible=_words(rows, "preemptible", _ANSWERS),
    )


class _Job:
    """One row's sizes, speed-up curve and work."""

    def __init__(self, rows: Rows, i: int, asked: int, duration: float, options: Options) -> None:
        if not 1 <= asked <= LARGEST:
            raise rows.error(i, f"gpus is {asked}", f"it must be 1..{LARGEST}")
        given = {name: rows.lines[i].get(name) or "" for name in ("speedup", "min", "max", "work", "load")}
        speedup = (given["speedup"] or options.speedup).strip()
        if given["load"]:
            speedup = speedup or "linear"
        points = _points(rows, i, speedup)
        if points is None and (given["min"] or given["max"] or given["work"]):
            raise rows.error(
                i, "min, max or work is given but no speedup", "say how it scales, for example linear or 0.9"
            )
        self.low = _whole(rows, i, "min", given["min"], 1 if points is not None else asked)
        last = asked if not isinstance(points, dict) else max(points)
        self.high = _whole(rows, i, "max", given["max"], max(last, self.low))
        if not 1 <= self.low <= self.high <= LARGEST:
            raise rows.error(i, f"min is {self.low} and max {self.high}", f"it must be 1 <= min <= max <= {LARGEST}")
        self.kind = _curve(points, asked, self.high)
        if not options.falling:
            self.kind = tuple(np.maximum.accumulate(self.kind).tolist())
        if self.kind[self.low] <= 0:
            raise rows.error(
                i, f"speedup says nothing for {self.low} workers", "a job must make progress at its minimum"
            )
        at_asked = self.kind[min(asked, len(self.kind) - 1)]
        self.work = rows.number(i, "work", given["work"]) if given["work"] else duration * at_asked


def _points(rows: Rows, i: int, text: str) -> dict[int, float] | float | None:
    """Measured points, an exponent, or None for a rigid job."""
    if not text:
        return None
    if text == "linear":
        return 1.0
    if ":" not in text:
        exponent = rows.number(i, "speedup", text)
        if not 0 <= exponent <= 1:
            raise rows.error(i, f"speedup is {text}", "an exponent must be 0..1")
        return exponent
    pairs = _pairs(rows, i, "speedup", text)
    sizes, values = [n for n, _ in pairs], [value for _, value in pairs]
    if sizes != sorted(set(sizes)) or sizes[0] < 1 or any(n != int(n) for n in sizes) or sizes[-1] > LARGEST:
        raise rows.error(i, f"speedup is {text!r}", "numbers of workers must be whole and rising")
    if min(values) < 0:
        raise rows.error(i, f"speedup is {text!r}", "no speed is below 0")
    return {int(n): value for n, value in pairs}


def _curve(points: dict[int, float] | float | None, asked: int, high: int) -> tuple[float, ...]:
    """Rates for 0..high workers."""
    n = np.arange(high + 1)
    if points is None:
        return tuple((n >= asked).astype(np.float64).tolist())
    if isinstance(points, dict):
        return tuple(np.interp(n, (0, *points), (0.0, *points.values())).tolist())
    return (0.0, *(n[1:] ** points).tolist())


def _load(rows: Rows, i: int, text: str, start_s: float) -> Load | None:
    if not text:
        return None
    pairs = _pairs(rows, i, "load", text)
    times, wanted = [t for t, _ in pairs], [w for _, w in pairs]
    if times != sorted(set(times)):
        raise rows.error(i, f"load is {text!r}", "its times must rise")
    if any(w < 0 or w != int(w) for w in wanted):
        raise rows.error(i, f"load is {text!r}", "replicas must be whole numbers, 0 or more")
    return Load(np.array(times) - start_s, np.array(wanted, np.int64))


def _pairs(rows: Rows, i: int, column: str, text: str) -> list[tuple[float, float]]:
    """`a:b;c:d` as numbers."""
    cells = [cell.partition(":") for cell in text.split(";") if cell.strip()]
    return [(rows.number(i, column, a.strip()), rows.number(i, column, b.strip())) for a, _, b in cells]


def _whole(rows: Rows, i: int, column: str, text: str, default: int) -> int:
    value = rows.number(i, column, text) if text.strip() else default
    if value != int(value):
        raise rows.error(i, f"{column} is {text}", "it must be a whole number")
    return int(value)


def _step(rows: Rows, i: int, text: str) -> int:
    if text.strip() == "pow2":
        return POWERS_OF_TWO
    step = _whole(rows, i, "step", text, 1)
    if step < 1:
        raise rows.error(i, f"step is {text}", "it must be 1 or more, or pow2 for powers of two")
    return step


def _ints(rows: Rows, column: str, empty: int) -> list[int] | None:
    return rows.ints(column, empty) if column in rows.header else None


def _floats(rows: Rows, column: str, empty: float) -> list[float] | None:
    return rows.floats(column, empty) if column in rows.header else None


def _positive(rows: Rows, column: str, empty: int, least: int = 1) -> list[int] | None:
    values = _ints(rows, column, empty)
    for i, value in enumerate(values or ()):
        if value < least:
            raise rows.error(i, f"{column} is {value}", f"it must be {least} or more")
    return values


def _words(rows: Rows, column: str, known: dict[str, int]) -> list[int] | None:
    """A column of words as numbers; None where it says nothing."""
    texts = rows.text(column)
    for i, text in enumerate(texts):
        if text.lower() not in known:
            raise rows.error(i, f"{column} is {text!r}", f"it must be {', '.join(filter(None, known))} or empty")
    return [known[text.lower()] for text in texts] if any(texts) else None


def _seconds(rows: Rows, column: str, endless: str | None = None) -> list[float] | None:
    """A column of seconds, nan where a cell is empty; None where all are."""
    texts = rows.text(column)
    if not any(texts):
        return None
    return [math.inf if text == endless else rows.number(i, column, text, math.nan) for i, text in enumerate(texts)]


def _demand(rows: Rows) -> Sequence[tuple[int, int, int]] | None:
    columns = [_positive(rows, name, 0, 0) for name in ("cpu_milli", "memory_mib", "gpu_memory_mib")]
    if not any(columns):
        return None
    return list(zip(*(column or [0] * len(rows) for column in columns), strict=True))


# Writing.


def rows_of(trace: Trace) -> list[Row]:
    """A trace as rows of this format; exact, so reading them gives the same trace."""
    if trace.phases or trace.spread_rates is not None or len(trace.pools) > 1:
        raise TraceError(
            f"trace {trace.name!r} cannot be written as plain CSV",
            hint="the format has no phases, no costs of spreading and no device types",
        )
    return [_row(trace, j) for j in range(len(trace))]


def write(rows: Iterable[Row], file: TextIO) -> None:
    """Write rows with the columns that any of them uses."""
    rows = list(rows)
    used = [name for name in OPTIONAL if any(row.get(name) not in (None, "") for row in rows)]
    writer = csv.DictWriter(file, [*REQUIRED, *used], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _row(trace: Trace, j: int) -> Row:
    curve = trace.rates[0, trace.curve[j]]
    low, high = int(trace.min_workers[j]), int(trace.max_workers[j])
    row: Row = {
        "job_id": trace.ids[j],
        "submit_s": _number(trace.submit_s[j]),
        "gpus": int(trace.requested[j]),
        "duration_s": _number(trace.duration_s[j]),
        "class": trace.classes[int(trace.klass[j])],
    }
    rigid = low == high == trace.requested[j] and curve[low] == 1 and trace.work[j] == trace.duration_s[j]
    if not rigid:
        row |= {"min": low, "max": high, "speedup": _text(curve, high), "work": _number(trace.work[j])}
    if np.isfinite(trace.deadline_s[j]):
        row["deadline_s"] = _number(trace.deadline_s[j])
    if trace.priority[j]:
        row["priority"] = int(trace.priority[j])
    if trace.step is not None and trace.step[j] != 1:
        row["step"] = "pow2" if trace.step[j] == POWERS_OF_TWO else int(trace.step[j])
    if trace.width[j] != GPU:
        row["gpu_milli"] = int(trace.width[j])
    for name, value in zip(("cpu_milli", "memory_mib", "gpu_memory_mib"), trace.demand[j].tolist(), strict=True):
        row[name] = value or None
    load = trace.services[j] if trace.services else None
    if load is not None:
        row["load"] = ";".join(f"{_number(t)}:{w}" for t, w in zip(load.at_s, load.wanted, strict=True))
    return row | _stops(trace, j)


def _stops(trace: Trace, j: int) -> Row:
    """What is said of one job's starts and stops."""
    row: Row = {}
    if trace.level is not None and trace.level[j] != UNSAID:
        row["level"] = LEVELS[int(trace.level[j])]
    if trace.preemptible is not None and trace.preemptible[j] != UNSAID:
        row["preemptible"] = "true" if trace.preemptible[j] else "false"
    for name in ("start_s", "resize_s", "checkpoint_s"):
        column = getattr(trace, name)
        if column is not None and not np.isnan(column[j]):
            row[name] = NEVER if np.isinf(column[j]) else _number(column[j])
    return row


def _text(curve: FloatArray, high: int) -> str:
    """The curve as points, without those that lie on the line through their neighbours."""
    top = min(high, len(curve) - 1)
    values = curve[: top + 1].tolist()
    keep = [n for n in range(1, top + 1) if n == top or values[n + 1] - values[n] != values[n] - values[n - 1]]
    if not all(np.interp(range(top + 1), (0, *keep), (0.0, *(values[n] for n in keep))) == values):
        keep = list(range(1, top + 1))
    return ";".join(f"{n}:{_number(values[n])}" for n in keep)


def _number(value: float) -> int | float:
    value = float(value)
    return int(value) if value == int(value) else value
