"""A run as a picture: who had how many workers when, how full the cluster was, how completion times spread.

The timelines come as text too (`text`), which needs nothing; the drawings need matplotlib (extra `report`).
All of them need a run that kept its changes (`Case.recorded`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stretto.core.snapshot import GPU, FloatArray
from stretto.errors import MissingExtra
from stretto.sim.runner import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps: TypeAlias = list[tuple[float, int]]
"""Moments at which a job's workers changed, and how many it had from then on."""

FEW = 40
"""More jobs than this are not told apart in a timeline."""

_COLOURS = ("#3b6ea5", "#c8553d", "#588b6f", "#8a6fa8", "#c99a2e", "#5b8fa8", "#a85b78", "#6b6b6b")


def steps(outcome: Outcome) -> list[Steps]:
    """Per job: its workers over time, ending with 0 at its finish."""
    found: list[Steps] = [[] for _ in outcome.case.trace.ids]
    for change in outcome.result.changes:
        found[change.job].append((change.at_s, change.workers))
    for job, finish in enumerate(outcome.result.finish_s.tolist()):
        if finish == finish:
            found[job].append((finish, 0))
    return found


def text(outcome: Outcome, until_s: float, width: int = 64) -> list[str]:
    """A timeline in letters: workers as digits, `.` while waiting; one line per job, one column per so many seconds."""
    trace = outcome.case.trace
    label = max(len(job) for job in trace.ids)
    column_s = max(until_s, 1e-9) / width
    lines = []
    for job, changes in enumerate(steps(outcome)):
        cells = [_cell(changes, float(trace.submit_s[job]), (column + 0.5) * column_s) for column in range(width)]
        jct = outcome.result.finish_s[job] - trace.submit_s[job]
        end = "rejected" if outcome.result.rejected[job] else f"{jct:,.0f} s"
        lines.append(f"{trace.ids[job]:>{label}} │{''.join(cells)}│ {end}")
    lines.append(f"{'':>{label}} └{'─' * width}┘")
    lines.append(f"{'':>{label}}  0{f'{until_s:,.0f} s':>{width - 1}}")
    return lines


def _cell(changes: Steps, submit_s: float, at_s: float) -> str:
    if at_s < submit_s or not changes or (at_s >= changes[-1][0] and changes[-1][1] == 0):
        return " " if at_s < submit_s or changes else "."
    workers = 0
    for moment, count in changes:
        if moment > at_s:
            break
        workers = count
    if not workers:
        return "."
    return str(workers) if workers < 10 else "+"


def in_use(outcome: Outcome) -> tuple[FloatArray, FloatArray]:
    """GPUs held over time: from each moment on, so many."""
    width = outcome.case.trace.width
    moments: list[float] = []
    delta: list[float] = []
    for job, changes in enumerate(steps(outcome)):
        before = 0
        for at_s, workers in changes:
            moments.append(at_s)
            delta.append((workers - before) * int(width[job]) / GPU)
            before = workers
    order = np.argsort(moments, kind="stable")
    at = np.array(moments, np.float64)[order]
    held = np.cumsum(np.array(delta, np.float64)[order])
    last = np.append(at[1:] != at[:-1], True)
    return at[last], held[last]


def timelines(outcomes: Sequence[Outcome]) -> bytes:
    """One panel per run: a bar per job, as thick as its workers. PNG."""
    end_s = max((_end(outcome) for outcome in outcomes), default=1.0)
    rows = max(len(outcome.case.trace) for outcome in outcomes)
    figure = _figure(9.0, len(outcomes) * (0.9 + 0.36 * min(rows, FEW)))
    for i, outcome in enumerate(outcomes):
        axes = figure.add_subplot(len(outcomes), 1, i + 1)
        _bars(axes, outcome)
        axes.set_xlim(0, end_s * 1.02)
        axes.set_title(_title(outcome), loc="left", fontsize=10)
    axes.set_xlabel("seconds")
    return _png(figure)


def _bars(axes: Axes, outcome: Outcome) -> None:
    trace = outcome.case.trace
    top = max(int(trace.max_workers.max()), int(trace.requested.max()))
    for job, changes in enumerate(steps(outcome)):
        colour = _COLOURS[job % len(_COLOURS)]
        start = float(trace.submit_s[job])
        end = changes[-1][0] if changes else start
        axes.hlines(job, start, end, colors=colour, linewidth=0.8, linestyles="dotted")
        for (at_s, workers), (until_s, _) in pairwise(changes):
            height = 0.15 + 0.7 * workers / top
            if workers:
                axes.barh(job, until_s - at_s, left=at_s, height=height, color=colour, edgecolor="white", linewidth=0.5)
                if len(trace) <= 12:
                    axes.text(
                        (at_s + until_s) / 2, job, str(workers), ha="center", va="center", color="white", fontsize=8
                    )
    axes.set_yticks(range(len(trace)), trace.ids, fontsize=8)
    axes.set_ylim(len(trace) - 0.4, -0.6)


def utilisation(outcomes: Sequence[Outcome]) -> bytes:
    """GPUs in use over time, a panel per run. PNG."""
    figure = _figure(9.0, 1.5 * len(outcomes) + 0.6)
    end_s = max((_end(outcome) for outcome in outcomes), default=1.0)
    for i, outcome in enumerate(outcomes):
        axes = figure.add_subplot(len(outcomes), 1, i + 1)
        at, held = in_use(outcome)
        axes.fill_between(at, held, step="post", color=_COLOURS[i % len(_COLOURS)], alpha=0.8, linewidth=0)
        axes.axhline(outcome.case.gpus, color="#444444", linewidth=0.8)
        axes.set_xlim(0, end_s * 1.02)
        axes.set_ylim(0, outcome.case.gpus * 1.08)
        axes.set_title(_title(outcome), loc="left", fontsize=10)
        axes.set_ylabel("GPUs", fontsize=8)
    axes.set_xlabel("seconds")
    return _png(figure)


def completion(outcomes: Sequence[Outcome]) -> bytes:
    """Share of jobs that took at most so long, a line per run. PNG."""
    figure = _figure(7.0, 3.8)
    axes = figure.add_subplot(1, 1, 1)
    for i, outcome in enumerate(outcomes):
        jct = outcome.result.finish_s - outcome.case.trace.submit_s
        jct = np.sort(jct[~np.isnan(jct) & ~outcome.result.is_service])
        colour = _COLOURS[i % len(_COLOURS)]
        axes.step(
            np.maximum(jct, 1e-3), np.arange(1, len(jct) + 1) / max(len(jct), 1), label=_name(outcome), color=colour
        )
    axes.set_xscale("log")
    axes.set_xlabel("completion time in seconds")
    axes.set_ylabel("share of jobs")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return _png(figure)


def _name(outcome: Outcome) -> str:
    return f"{outcome.result.policy}, {outcome.case.trace.name}"


def _title(outcome: Outcome) -> str:
    figures = outcome.metrics
    return (
        f"{outcome.result.policy}: all done after {figures.makespan_s:,.0f} s, {100 * figures.utilisation:.0f} % in use"
    )


def _end(outcome: Outcome) -> float:
    finish = outcome.result.finish_s
    return 1.0 if np.isnan(finish).all() else float(np.nanmax(finish))


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Made
    except ImportError:
        raise MissingExtra("drawing needs matplotlib", hint="pip install 'stretto[report]'") from None
    figure = Made(figsize=(width, max(height, 1.5)), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
