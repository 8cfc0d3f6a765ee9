"""Microsoft ITP cluster traces (microsoft/elasticflow-traces).

Two kinds of file. Raw: job_id, submission_time, duration, num_gpu: every job is rigid. With models:
num_iteration, model_name, deadline and batch_size besides: jobs are elastic, from one GPU to the smallest
number with the highest measured throughput (`falling=true`: to the largest that was measured, though it be slower);
rigid policies use num_gpu and the trace's duration.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.sim.readers import Rows, throughputs
from stretto.sim.trace import Trace


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    throughputs: str = "A100"
    """A set of scaling curves that comes with the package, or a folder of them."""
    falling: bool = False
    """Keep the part of a curve where more GPUs are slower."""


def read(path: Path, options: Options) -> Trace:
    """Read one cluster's file."""
    rows = Rows(path, ["job_id", "submission_time", "duration", "num_gpu"])
    ids, submit = rows.text("job_id"), rows.floats("submission_time")
    asked, duration = rows.ints("num_gpu"), rows.floats("duration")
    if "num_iteration" not in rows.header:
        return Trace.build(path.stem, ids, submit, asked, duration, rows=rows.numbers)
    known = throughputs.load(options.throughputs)
    kinds = list(zip(rows.text("model_name"), rows.ints("batch_size"), strict=True))
    if not known.keys() >= set(kinds):
        raise throughputs.unknown_kind(rows, kinds, known, options.throughputs)
    return Trace.build(
        path.stem,
        ids,
        submit,
        asked,
        duration,
        rows=rows.numbers,
        work=rows.floats("num_iteration"),
        **throughputs.columns(kinds, {kind: known[kind].curve(options.falling) for kind in set(kinds)}),
        deadline_s=rows.floats("deadline", empty=float("inf")) if "deadline" in rows.header else None,
        # Models and batches were drawn at random for these jobs; what tells their lengths apart is their width.
        classes=[f"{n} GPUs" for n in asked],
    )
