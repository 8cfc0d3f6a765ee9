"""`stretto sim …`: run a trace under a policy, compare several, draw and explain what happened."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter

import stretto
from stretto import plugins
from stretto.cli import show
from stretto.cli.options import Cluster, Format, Json, PolicyName, PolicyNames, Set, TracePath
from stretto.errors import TraceError, UsageError, unknown
from stretto.sim import dual_bound, figures, hetero_bound, live_record, record, report, runner
from stretto.sim.metrics import Metrics
from stretto.sim.runner import Case, Outcome

app = App(name="sim", help="Simulate a trace under a policy; compare, draw, explain.", help_format="plaintext")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every run needs besides a trace and a policy."""

    format: Format = "csv"
    cluster: Cluster
    set: Set = field(default_factory=list)

    def prepare(self, traces: Sequence[Path], policies: Sequence[str]) -> list[Case]:
        """Every trace under every policy."""
        return runner.prepare_all(traces, self.format, self.cluster, policies, runner.parse_settings(self.set))

    def header(self, trace: Path, policy: str) -> record.Header:
        """Of a record of such a run."""
        return record.header_of(trace, self.format, self.cluster, policy, runner.parse_settings(self.set))


@app.command
def run(
    trace: TracePath,
    /,
    *,
    setup: Setup,
    policy: PolicyName = "stretto",
    json: Json = False,
    bound: Annotated[
        Literal["simple", "dual"], Parameter(help="dual: a much tighter bound, which takes long.")
    ] = "simple",
    record_to: Annotated[Path | None, Parameter(name="--record", help="Write every decision to this file.")] = None,
) -> None:
    """Run a trace under one policy and print what it was worth."""
    (case,) = setup.prepare([trace], [policy])
    if record_to is None:
        outcome = _run(case)
    else:
        with record_to.open("w", encoding="utf-8") as file:
            outcome = _run(record.kept(case, setup.header(trace, policy), file))
    found = _with_tight_bound(outcome) if bound == "dual" else outcome.metrics
    if json:
        show.as_json(found.plain())
    else:
        _print_run(found)


@app.command
def compare(
    *traces: TracePath,
    setup: Setup,
    policies: PolicyNames,
    json: Json = False,
    csv: Annotated[Path | None, Parameter(help="Write all figures to this CSV file.")] = None,
) -> None:
    """Run every trace under every policy and print the figures side by side."""
    _need_traces(traces)
    cases = setup.prepare(traces, _names(policies))
    found = [_run(case).metrics for case in cases]
    if csv is not None:
        csv.write_text(report.metrics_csv(found), encoding="utf-8")
    if json:
        show.as_json([each.plain() for each in found])
    else:
        _print_comparison(found)


@app.command(name="report")
def report_(
    *traces: TracePath,
    setup: Setup,
    policies: PolicyNames = "stretto",
    out: Annotated[Path, Parameter(help="The folder to write to.")] = Path("out/report"),
) -> None:
    """Write an HTML page with figures and pictures, and its PNG and CSV files."""
    _need_traces(traces)
    cases = setup.prepare(traces, _names(policies))
    outcomes = [_run(case.recorded()) for case in cases]
    for path in report.write(outcomes, out):
        print(path)


@app.command
def timeline(
    trace: TracePath,
    /,
    *,
    setup: Setup,
    policies: PolicyNames = "stretto",
    width: Annotated[int, Parameter(help="Columns of the drawing.")] = 64,
    png: Annotated[Path | None, Parameter(help="Draw it to this file too.")] = None,
) -> None:
    """Draw every job's workers over time, in letters: digits are workers, dots are waiting."""
    cases = setup.prepare([trace], _names(policies))
    if len(cases[0].trace) > figures.FEW:
        raise UsageError(
            f"{len(cases[0].trace)} jobs are too many to draw one by one",
            hint=f"up to {figures.FEW} can be drawn; stretto sim report draws larger traces as a whole",
        )
    if not 10 <= width <= 1000:
        raise UsageError(f"a width of {width} columns cannot be drawn", hint="give 10..1000")
    outcomes = [_run(case.recorded()) for case in cases]
    until_s = max((outcome.metrics.makespan_s for outcome in outcomes), default=0.0)
    for outcome in outcomes:
        of = outcome.metrics
        mean, full = (report.cell(name, of.plain()[name]) for name in ("avg_jct_s", "utilisation"))
        print(
            f"{of.policy}: all done after {of.makespan_s:,.0f} s, mean completion {mean} s, {full} of the GPUs in use"
        )
        print("\n".join(figures.text(outcome, until_s, width)) + "\n")
    if png is not None:
        drawn = figures.timelines(outcomes)
        png.parent.mkdir(parents=True, exist_ok=True)
        png.write_bytes(drawn)
        print(png)


@app.command(alias="explain")
def why(
    trace: TracePath,
    /,
    *,
    job: Annotated[str, Parameter(help="The job's id in the trace.")],
    setup: Setup,
    policy: PolicyName = "stretto",
    json: Json = False,
) -> None:
    """Say for one job when it got how many workers, and why."""
    (case,) = setup.prepare([trace], [policy])
    if job not in case.trace.ids:
        raise unknown("job", job, list(case.trace.ids[:20]))
    number = case.trace.ids.index(job)
    with show.progress(policy) as progress:
        (causes,), outcome = record.why(case, [number], progress)
    finish = float(outcome.result.finish_s[number])
    if json:
        found = [{**msgspec.to_builtins(cause), "text": cause.sentence} for cause in causes]
        show.as_json({"job": job, "causes": found, "finish_s": finish if finish == finish else None})
        return
    rows = [[f"{cause.at_s:,.1f}", str(cause.workers), cause.sentence] for cause in causes]
    if finish == finish:
        rows.append([f"{finish:,.1f}", "0", "finished"])
    wide = max(len(row[0]) for row in rows)
    for at_s, workers, sentence in rows:
        print(f"{at_s:>{wide}} s  {workers:>4} workers  {sentence}")


@app.command
def replay(
    recording: Annotated[Path, Parameter(help="A file made by `stretto sim run --record` or `stretto up --record`.")],
    /,
    *,
    trace: Annotated[Path | None, Parameter(help="The trace, where it is not where it was.")] = None,
    policy: Annotated[str, Parameter(help="The file of the policy, where a live one decided by a file.")] = "",
) -> int:
    """Decide again what was recorded and compare every decision."""
    by = stretto.__version__
    if live_record.is_live(recording):
        deciders, outcome = _replay_live(recording, policy)
    else:
        header = record.read_header(recording)
        case, deciders, by = record.case_of(header, trace), header.policy, header.stretto
        with show.progress(header.policy) as progress:
            outcome = record.replay(recording, case, progress)
    if not outcome.decisions and outcome.difference is None:
        raise TraceError(
            f"record {recording.name!r} has no decision in it", hint="nothing was decided, or it was cut off"
        )
    if outcome.difference is None:
        print(f"the same: {outcome.decisions:,} decisions of {deciders}")
        return 0
    first = outcome.difference
    print(f"different at line {first.line} ({first.at_s:g} s): {first.what}", file=sys.stderr)
    if live_record.is_live(recording) and not live_record.of_this_kind(recording):
        print("it was recorded with other versions, or on another kind of processor", file=sys.stderr)
    elif by != stretto.__version__:
        print(f"it was recorded by stretto {by}; this is {stretto.__version__}", file=sys.stderr)
    return 1


def _replay_live(recording: Path, policy: str) -> tuple[str, record.Replay]:
    found = live_record.names(recording)
    policies = {}
    for name, options in found:
        one = plugins.find(policy or name, options)
        policies[name, json.dumps(options, sort_keys=True)] = one
    trusted = {one.function.__module__ for one in policies.values()}
    return ", ".join(sorted({name for name, _ in found})), live_record.replay(recording, policies, trusted)


def _run(case: Case) -> Outcome:
    with show.progress(f"{case.policy.name}, {case.trace.name}") as progress:
        return runner.run(case, progress)


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    if not names:
        raise UsageError("no policy was given", hint="for example --policies fifo,srtf,stretto")
    return names


def _need_traces(traces: tuple[Path, ...]) -> None:
    if not traces:
        raise UsageError("no trace was given", hint="give one or more trace files before the options")


def _with_tight_bound(outcome: Outcome) -> Metrics:
    """The bound that takes long: by prices of GPU time, or on several device types by a linear programme.

    Both are for all jobs of a trace; where some were turned away there is none.
    """
    case, value = outcome.case, math.nan
    complete = outcome.metrics.finished == outcome.metrics.jobs
    if len(case.pools) > 1:
        if complete:
            value = hetero_bound.makespan(case.seen, case.pools, case.nodes)
        return msgspec.structs.replace(outcome.metrics, lp_bound_makespan_s=value)
    if complete:
        with show.progress("dual bound") as progress:
            value = dual_bound.average_jct(case.seen, case.gpus, progress=progress)
    return msgspec.structs.replace(outcome.metrics, dual_bound_avg_jct_s=value)


def _print_run(each: Metrics) -> None:
    values = each.plain()
    print(f"{each.policy} on {each.trace}: {each.jobs:,} jobs, {each.gpus:g} GPUs")
    show.listing([(name, report.cell(name, value)) for name, value in values.items() if name not in _HEADLINE])


_HEADLINE = ("policy", "trace", "jobs", "gpus")


def _print_comparison(found: Sequence[Metrics]) -> None:
    for trace in dict.fromkeys(each.trace for each in found):
        of_trace = [each for each in found if each.trace == trace]
        names = report.shown(of_trace)
        rows = [[each.policy, *(report.cell(name, each.plain()[name]) for name in names)] for each in of_trace]
        title = f"{trace}: {of_trace[0].jobs:,} jobs on {of_trace[0].gpus:g} GPUs"
        show.table(["policy", *(report.COLUMNS[name] for name in names)], rows, title)
