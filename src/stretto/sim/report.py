"""Runs side by side as files: one HTML page with everything inside it, and its pictures and tables beside it.

`report.html` needs no other file and no network. `figures.csv` has a row per run, `jobs-….csv` a row per job;
the pictures are saved as PNG too, to be put into a paper or a slide.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import stretto
from stretto.sim import figures, metrics
from stretto.sim.runner import Outcome

COLUMNS: dict[str, str] = {
    "avg_jct_s": "mean completion, s",
    "p50_jct_s": "p50, s",
    "p99_jct_s": "p99, s",
    "avg_wait_s": "mean wait, s",
    "makespan_s": "makespan, s",
    "utilisation": "in use",
    "useful_utilisation": "useful",
    "preemptions": "preemptions",
    "resizes": "resizes",
    "lost_s": "lost by stops, s",
    "worst_ftf": "worst fairness",
    "deadlines_met": "deadlines met",
    "rejected": "rejected",
    "lower_bound_avg_jct_s": "bound on the mean, s",
    "lower_bound_makespan_s": "bound on the makespan, s",
}
"""The figures that tables show, with their headings."""


def write(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write the page, its pictures and its tables; gives the paths, the page first."""
    pictures = draw(outcomes)
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "report.html"]
    written[0].write_text(page(outcomes, pictures), encoding="utf-8")
    for name, (_, png) in pictures.items():
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(png)
    written.append(folder / "figures.csv")
    written[-1].write_text(metrics_csv([outcome.metrics for outcome in outcomes]), encoding="utf-8")
    for outcome in outcomes:
        name = f"jobs-{_safe(outcome.case.trace.name)}-{_safe(outcome.result.policy)}.csv"
        written.append(folder / name)
        written[-1].write_text(jobs_csv(outcome), encoding="utf-8")
    return written


def draw(outcomes: Sequence[Outcome]) -> dict[str, tuple[str, bytes]]:
    """File name → heading and PNG. A timeline is drawn for few jobs only: of many nothing could be seen."""
    pictures = {}
    small = [outcome for outcome in outcomes if len(outcome.case.trace) <= figures.FEW]
    if small:
        pictures["timeline"] = ("Workers of each job over time", figures.timelines(small))
    pictures["utilisation"] = ("GPUs in use", figures.utilisation(outcomes))
    pictures["completion"] = ("Completion times", figures.completion(outcomes))
    return pictures


def page(outcomes: Sequence[Outcome], pictures: dict[str, tuple[str, bytes]]) -> str:
    """The HTML page. Everything that came from a file is escaped."""
    traces = dict.fromkeys(outcome.case.trace.name for outcome in outcomes)
    parts = [f"<h1>Simulation of {html.escape(', '.join(traces))}</h1>"]
    for trace in traces:
        of_trace = [outcome for outcome in outcomes if outcome.case.trace.name == trace]
        first = of_trace[0].metrics
        parts.append(f"<h2>{html.escape(trace)}: {first.jobs:,} jobs on {first.gpus:g} GPUs</h2>")
        parts.append(_table(of_trace))
    for heading, png in pictures.values():
        data = base64.b64encode(png).decode()
        parts.append(
            f'<h2>{html.escape(heading)}</h2><img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">'
        )
    parts.append(_settings(outcomes[0]))
    head = f'<meta charset="utf-8"><title>Stretto</title>{_STYLE}'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def metrics_csv(found: Sequence[metrics.Metrics]) -> str:
    """A row per run with every figure."""
    rows = [each.plain() for each in found]
    return _csv(list(rows[0]), rows)


def jobs_csv(outcome: Outcome) -> str:
    """A row per job: what happened to it."""
    trace, result = outcome.case.trace, outcome.result
    fairness = metrics.fairness(outcome.case.given, outcome.case.nodes, result)
    columns: dict[str, NDArray[Any]] = {
        "job_id": np.array(trace.ids, object),
        "submit_s": trace.submit_s,
        "gpus": trace.requested,
        "start_s": result.start_s,
        "finish_s": result.finish_s,
        "jct_s": result.finish_s - trace.submit_s,
        "wait_s": result.start_s - trace.submit_s,
        "gpu_s": result.gpu_s,
        "preemptions": result.preemptions,
        "resizes": result.resizes,
        "paused_s": result.paused_s,
        "lost_s": result.lost_s,
        "lost_to_failures_s": result.lost_to_failures_s,
        "deadline_s": trace.deadline_s,
        "fairness": fairness,
        "rejected": result.rejected.astype(np.int64),
    }
    lists = [column.tolist() for column in columns.values()]
    return _csv(list(columns), [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)])


def cell(name: str, value: Any) -> str:
    """A figure as people read it."""
    if value is None:
        return "–"
    if name in ("utilisation", "useful_utilisation"):
        return f"{100 * value:.1f} %"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def shown(found: Sequence[metrics.Metrics]) -> list[str]:
    """The columns worth showing: lost work, deadlines and rejections only where there are any."""
    rows = [each.plain() for each in found]
    optional = ("lost_s", "deadlines_met", "rejected")
    return [name for name in COLUMNS if name not in optional or any(row[name] for row in rows)]


def _table(outcomes: Sequence[Outcome]) -> str:
    names = shown([outcome.metrics for outcome in outcomes])
    head = "".join(f"<th>{html.escape(COLUMNS[name])}</th>" for name in names)
    rows = []
    for outcome in outcomes:
        values = outcome.metrics.plain()
        cells = "".join(f"<td>{cell(name, values[name])}</td>" for name in names)
        rows.append(f"<tr><th>{html.escape(outcome.result.policy)}</th>{cells}</tr>")
    return f"<table><tr><th>policy</th>{head}</tr>{''.join(rows)}</table>"


def _settings(outcome: Outcome) -> str:
    settings = html.escape(str(outcome.case.settings))
    return f"<p>Stretto {stretto.__version__}. The world: <code>{settings}</code></p>"


def _csv(columns: list[str], rows: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _blank(value) for key, value in row.items()})
    return out.getvalue()


def _blank(value: Any) -> Any:
    """nan and inf are empty cells."""
    return "" if isinstance(value, float) and not np.isfinite(value) else value


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"


_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: right; white-space: nowrap }
th { text-align: left; font-weight: 600 } img { max-width: 100% } code { font-size: .8rem }
</style>"""
