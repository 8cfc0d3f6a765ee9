"""ElasticFlow's deadline traces (pkusys/ElasticFlow): job_id, submit_time, iteration, model_name, ddl, batch_size,
num_gpu, duration.

Jobs are elastic from one GPU to the largest measured number. The curves are kept as they were measured, also
where more GPUs are slower, because ElasticFlow's EDF baseline walks into just that; `falling=false` ends each curve
at its highest point instead, as other formats do. Rigid policies use num_gpu and duration. A job with
best_effort = 1, or without a ddl, has no deadline.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from stretto.sim.readers import Rows, throughputs
from stretto.sim.readers.throughputs import Kind, Measured
from stretto.sim.trace import Trace

_SETS = ("A100", "T4")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    throughputs: str = ""
    """A set of scaling curves (A100, T4) or a folder of them; empty: the first set that has every model."""
    falling: bool = True
    """Keep the part of a curve where more GPUs are slower."""


def read(path: Path, options: Options) -> Trace:
    """Read one trace."""
    rows = Rows(path, ["job_id", "submit_time", "iteration", "model_name", "ddl", "batch_size", "num_gpu", "duration"])
    kinds = list(zip(rows.text("model_name"), rows.ints("batch_size"), strict=True))
    known = _curves(rows, kinds, options.throughputs)
    curves = {kind: known[kind].curve(options.falling) for kind in set(kinds)}
    deadline = rows.floats("ddl", empty=math.inf)
    if "best_effort" in rows.header:
        marks = rows.ints("best_effort", empty=0)
        deadline = [math.inf if mark else due for mark, due in zip(marks, deadline, strict=True)]
    return Trace.build(
        path.stem,
        rows.text("job_id"),
        rows.floats("submit_time"),
        rows.ints("num_gpu"),
        rows.floats("duration"),
        rows=rows.numbers,
        work=rows.floats("iteration"),
        **throughputs.columns(kinds, curves),
        deadline_s=deadline,
        classes=[f"{model}/{batch}" for model, batch in kinds],
    )


def _curves(rows: Rows, kinds: list[Kind], source: str) -> dict[Kind, Measured]:
    """The curves of the named set, or of the first set that has them all."""
    sources = [source] if source else _SETS
    for candidate in sources:
        known = throughputs.load(candidate)
        if known.keys() >= set(kinds):
            return known
    raise throughputs.unknown_kind(rows, kinds, throughputs.load(sources[0]), sources[0])
