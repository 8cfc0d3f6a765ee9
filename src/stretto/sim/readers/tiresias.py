"""Traces of the Tiresias simulator: job_id, num_gpu, submit_time, duration; the model's name is the job's class.

Jobs are rigid: `iterations` and `interval` say nothing about other sizes and are not read.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from stretto.sim.readers import Rows
from stretto.sim.trace import Trace


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def read(path: Path, options: Options) -> Trace:
    """Read one trace file."""
    rows = Rows(path, ["job_id", "num_gpu", "submit_time", "duration"])
    return Trace.build(
        path.stem,
        rows.text("job_id"),
        rows.floats("submit_time"),
        rows.ints("num_gpu"),
        rows.floats("duration"),
        rows=rows.numbers,
        classes=rows.text("model_name") if "model_name" in rows.header else None,
    )
