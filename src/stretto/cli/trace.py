"""`stretto trace …`: make a workload, look into a trace, turn one into the plain format."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from stretto.cli import show
from stretto.cli.options import Format, Json, Set, TracePath
from stretto.core.snapshot import GPU
from stretto.sim import generate, runner
from stretto.sim.readers import plain
from stretto.sim.trace import Trace

app = App(name="trace", help="Traces: make one, look into one, convert one.", help_format="plaintext")

Out = Annotated[Path | None, Parameter(help="The file to write; standard output when not given.")]


@app.command
def gen(
    *,
    set_: Annotated[list[str], Parameter(name="--set", negative=(), help="key=value; an unknown key lists all.")] = [],  # noqa: B006
    out: Out = None,
) -> None:
    """Make a synthetic workload in the plain CSV format; the same settings give the same file."""
    _write(generate.rows(generate.parse(runner.parse_settings(set_))), out)


@app.command
def info(
    trace: TracePath,
    /,
    *,
    format: Format = "csv",
    cluster: Annotated[str | None, Parameter(help="NODESxGPUS: say how full the trace would keep it.")] = None,
    set_: Set = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Say what is in a trace."""
    jobs = runner.read_trace(trace, format, runner.parse_settings(set_))
    found = _facts(jobs)
    if cluster is not None:
        _, nodes = runner.parse_cluster(cluster)
        span = max(found["span_s"], 1e-9)
        found["offered_load"] = round(found["gpu_hours"] * 3600 / span / float(nodes.devices.sum()), 4)
    if json:
        show.as_json(found)
    else:
        show.listing([(name, str(value)) for name, value in found.items()])


@app.command
def convert(
    trace: TracePath,
    /,
    *,
    format: Format,
    set_: Set = [],  # noqa: B006
    out: Out = None,
) -> None:
    """Write a trace in the plain CSV format."""
    _write(plain.rows_of(runner.read_trace(trace, format, runner.parse_settings(set_))), out)


def _write(rows: list[plain.Row], out: Path | None) -> None:
    text = io.StringIO()
    plain.write(rows, text)
    if out is None:
        sys.stdout.write(text.getvalue())
    else:
        out.write_text(text.getvalue(), encoding="utf-8")


def _facts(trace: Trace) -> dict[str, Any]:
    services = sum(load is not None for load in trace.services)
    sizes, counts = np.unique(trace.requested, return_counts=True)
    due = int(np.isfinite(trace.deadline_s).sum())
    facts = {
        "name": trace.name,
        "jobs": len(trace) - services,
        "services": services,
        "span_s": float(trace.submit_s.max()),
        "gpu_hours": round(float((trace.duration_s * trace.need_milli).sum()) / GPU / 3600, 3),
        "mean_duration_s": round(float(trace.duration_s.mean()), 3),
        "median_duration_s": float(np.median(trace.duration_s)),
        "longest_s": float(trace.duration_s.max()),
        "elastic_jobs": int((trace.min_workers < trace.max_workers).sum()) - services,
        "deadlines": due,
        "classes": len(trace.classes),
        "device_types": ", ".join(trace.pools),
    }
    return facts | {"jobs_by_gpus": dict(zip(sizes.tolist(), counts.tolist(), strict=True))}
