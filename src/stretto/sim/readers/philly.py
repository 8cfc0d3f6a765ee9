"""Microsoft's Philly trace as reduced for Pollux: timestamp, duration, num_gpus, in no order.

Jobs are rigid and have no id: the id is the number of the row, the first row below the header being 0.
Timestamps are `YYYY-MM-DD HH:MM:SS` and are taken as they stand, without daylight saving.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import msgspec

from stretto.sim.readers import Rows
from stretto.sim.trace import Trace

_ORIGIN = datetime(1970, 1, 1)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


def read(path: Path, options: Options) -> Trace:
    """Read the trace; the virtual cluster is the job's class."""
    rows = Rows(path, ["timestamp", "duration", "num_gpus"])
    return Trace.build(
        path.stem,
        [str(i) for i in range(len(rows))],
        [_seconds(rows, i, text) for i, text in enumerate(rows.text("timestamp"))],
        rows.ints("num_gpus"),
        rows.floats("duration"),
        rows=rows.numbers,
        classes=rows.text("cluster") if "cluster" in rows.header else None,
    )


def _seconds(rows: Rows, index: int, text: str) -> float:
    try:
        return (datetime.fromisoformat(text).replace(tzinfo=None) - _ORIGIN).total_seconds()
    except ValueError:
        raise rows.error(index, f"timestamp is {text!r}", "it must look like 2017-10-09 07:01:55") from None
