"""Microsoft ITP cluster traces (microsoft/elasticflow-traces).

Two kinds of file. Raw: job_id, submission_time, duration, num_gpu: every job is rigid. With models:
num_iteration, model_name, deadline and batch_size besides: jobs are elastic, from one GPU to the smallest
number with the highest measured throughput; rigid policies use num_gpu and the trace's duration.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.sim.readers import Rows, throughputs
from stretto.sim.trace import Trace


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    throughputs: str = "A100"
    """A set of scaling curves that comes with the package, or a folder of them."""


def read(path: Path, options: Options) -> Trace:
    """Read one cluster's file."""
    rows = Rows(path, ["job_id", "submission_time", "duration", "num_gpu"])
    ids, submit = rows.text("job_id"), rows.floats("submission_time")
    asked, duration = rows.ints("num_gpu"), rows.floats("duration")
    if "num_iteration" not in rows.header:
        return Trace.build(path.stem, ids, submit, asked, duration, rows=rows.numbers)
    known = throughputs.load(options.throughputs)
    names = list(zip(rows.text("model_name"), rows.ints("batch_size"), strict=True))
    for i, name in enumerate(names):
        if name not in known:
            have = ", ".join(f"{model}/{batch}" for model, batch in known)
            raise rows.error(i, f"no throughputs for model {name[0]!r} with batch {name[1]}", f"known: {have}")
    kinds = sorted(set(names))
    curves = [known[kind].curve() for kind in kinds]
    index = {kind: i for i, kind in enumerate(kinds)}
    return Trace.build(
        path.stem,
        ids,
        submit,
        asked,
        duration,
        rows=rows.numbers,
        work=rows.floats("num_iteration"),
        curve=[index[name] for name in names],
        rates=throughputs.stack(curves),
        min_workers=[1] * len(ids),
        max_workers=[len(curves[index[name]]) - 1 for name in names],
        deadline_s=rows.floats("deadline", empty=float("inf")) if "deadline" in rows.header else None,
        # Models and batches were drawn at random for these jobs; what tells their lengths apart is their width.
        classes=[f"{n} GPUs" for n in asked],
    )
