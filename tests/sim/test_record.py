"""A run that is written down can be played again, and the smallest difference is found and named."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from strategies import trace_of
from stretto.core.decision import Decision
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import TraceError
from stretto.sim import cluster, engine, record, runner
from stretto.sim.runner import Case
from stretto.sim.world import Settings

TRACE = """job_id,submit_s,gpus,duration_s,speedup
a,0,4,100,linear
b,10,4,20,linear
c,20,1,5,
d,30,2,50,0.8
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    return path


def kept(trace: Path, policy: str = "srtf", *, views: bool = False, **settings: str) -> Path:
    """A record of one run."""
    case = runner.prepare(trace, "csv", "1x4", policy, settings)
    header = record.header_of(trace, "csv", "1x4", policy, settings)
    path = trace.with_suffix(".jsonl")
    with path.open("w") as file:
        runner.run(record.kept(case, msgspec.structs.replace(header, views=views), file))
    return path


def again(path: Path) -> record.Replay:
    return record.replay(path, record.case_of(record.read_header(path)))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("policy", ["fifo", "srtf", "tiresias"])
def test_replay_is_the_same(trace: Path, policy: str, views: bool) -> None:
    path = kept(trace, policy, views=views, start_s="2", estimate_sd="0.3", seed="5")
    outcome = again(path)
    assert outcome.difference is None
    assert outcome.decisions == len(path.read_text().splitlines()) - 1 > 4


def test_watching_changes_nothing(trace: Path) -> None:
    case = runner.prepare(trace, "csv", "1x4", "srtf", {})
    watched = msgspec.structs.replace(case, policy=record.watched(case.policy, lambda view, decision: None))
    plain, seen = runner.run(case).result, runner.run(watched).result
    assert np.array_equal(plain.finish_s, seen.finish_s)
    assert np.array_equal(plain.preemptions, seen.preemptions)


@pytest.mark.parametrize("views", [False, True])
def test_a_changed_decision_is_found(trace: Path, views: bool) -> None:
    path = kept(trace, views=views)
    lines = path.read_text().splitlines()
    changed = json.loads(lines[2])
    changed["workers"][0] += 1
    lines[2] = json.dumps(changed)
    path.write_text("\n".join(lines))
    difference = again(path).difference
    assert difference is not None
    assert difference.line == 3
    assert "workers" in difference.what
    assert "job number 0" in difference.what


def test_another_trace_is_found(trace: Path) -> None:
    path = kept(trace)
    trace.write_text(TRACE.replace("c,20,1,5", "c,20,1,6"))
    difference = again(path).difference
    assert difference is not None
    assert "snapshot" in difference.what


def test_records_of_different_length(trace: Path) -> None:
    path = kept(trace)
    whole = path.read_text().splitlines()
    path.write_text("\n".join(whole[:-1]))
    difference = again(path).difference
    assert difference is not None
    assert difference.what == "the record ended early"
    path.write_text("\n".join([*whole, whole[-1]]))
    difference = again(path).difference
    assert difference is not None
    assert difference.what == "the replay ended early"


@pytest.mark.parametrize("text", ["", "{}", "not json", "[1]", "\x00\x01", '{"at_s": 1}'])
def test_damaged_records_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match="record"):
        record.read_header(path)


def test_a_damaged_line_is_named(trace: Path) -> None:
    path = kept(trace)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "{}", *lines[4:]]))
    with pytest.raises(TraceError, match="line 4"):
        again(path)


def test_a_record_that_was_cut_off_says_so(trace: Path) -> None:
    path = kept(trace)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TraceError, match=r"line \d+: it ends in the middle"):
        again(path)


def test_a_header_of_another_version_names_it(trace: Path) -> None:
    path = kept(trace)
    first, *rest = path.read_text().splitlines()
    header = json.loads(first)
    del header["cluster"]
    path.write_text("\n".join([json.dumps(header | {"stretto": "99.1"}), *rest]))
    with pytest.raises(TraceError, match=r"written by stretto 99\.1, is not a record: line 1: .*`cluster`"):
        record.read_header(path)


def test_a_compressed_record_is_read(trace: Path) -> None:
    path = kept(trace)
    with gzip.open(path.with_suffix(".jsonl.gz"), "wt") as file:
        file.write(path.read_text())
    assert again(path.with_suffix(".jsonl.gz")).difference is None


def test_lines_are_strict_json(trace: Path) -> None:
    for line in kept(trace).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def views_of(case: Case) -> list[Snapshot]:
    views: list[Snapshot] = []

    def watch(view: Snapshot, decision: Decision) -> None:
        views.append(view)

    engine.simulate(case.trace, case.pools, case.nodes, record.watched(case.policy, watch), case.settings)
    return views


def test_every_column_counts_in_the_digest(trace: Path) -> None:
    view = views_of(runner.prepare(trace, "csv", "1x4", "srtf", {}))[3]
    seen = {record.digest(view)}
    columns = [name for name in view.__struct_fields__ if isinstance(getattr(view, name), np.ndarray)]
    for name in columns:
        column = getattr(view, name)
        if column.size:
            other = ~column if column.dtype == np.bool_ else np.where(np.isfinite(column), column + 1, 0)
            seen.add(record.digest(msgspec.structs.replace(view, **{name: other})))
    assert len(seen) == 1 + sum(getattr(view, name).size > 0 for name in columns)


def why(case: Case, job: str) -> tuple[list[record.Cause], float]:
    number = case.trace.ids.index(job)
    (causes,), outcome = record.why(case, [number])
    return causes, float(outcome.result.finish_s[number])


def test_why_tells_the_story_of_a_job(trace: Path) -> None:
    """b needs the whole cluster: it takes it from a, which is longer; c and d are shorter than a too."""
    causes, finish = why(runner.prepare(trace, "csv", "1x4", "srtf", {}), "a")
    assert [(cause.at_s, cause.workers) for cause in causes][:2] == [(0.0, 4), (10.0, 0)]
    assert causes[1].sentence.startswith("stopped")
    assert causes[-1].workers == 4
    assert finish == causes[-1].at_s + 90


def test_why_includes_waiting(trace: Path) -> None:
    causes, _ = why(runner.prepare(trace, "csv", "1x4", "fifo", {}), "b")
    assert [(cause.at_s, cause.workers) for cause in causes] == [(10.0, 0), (100.0, 4)]
    assert "waits" in causes[0].sentence


def test_why_tells_what_came_of_it_where_there_was_no_place(tmp_path: Path) -> None:
    """Two GPUs are free, one on each node, and the job needs two of one node."""
    path = tmp_path / "jobs.csv"
    rows = ["a,0,1,100,", "b,0,1,100,", "pair,10,1,5,2000"]
    path.write_text("\n".join(["job_id,submit_s,gpus,duration_s,gpu_milli", *rows]))
    case = runner.prepare(path, "csv", "2x2", "fit-first", {"placement": "spread"})
    causes, finish = why(case, "pair")
    assert [(cause.at_s, cause.workers) for cause in causes] == [(10.0, 0), (100.0, 1)]
    assert causes[0].sentence == "waits with 2 GPUs free: no nodes have room for 1 worker"
    assert finish == 105


def test_why_tells_of_lost_nodes(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s,speedup\na,0,4,100,linear\n")
    settings = {"placement": "pack", "failures": "40:1,80:1:up"}
    causes, finish = why(runner.prepare(path, "csv", "2x2", "elastic-fifo", settings), "a")
    assert [(cause.at_s, cause.workers, cause.nodes) for cause in causes if cause.reason == 25] == [(40.0, 2, (2, 0))]
    assert causes[-1].workers == 4
    assert finish == 120


def test_header_round_trip(trace: Path) -> None:
    header = record.header_of(trace, "csv", "1x4", "srtf", {"start_s": "1"})
    file = io.StringIO()
    record.kept(runner.prepare(trace, "csv", "1x4", "srtf", {}), header, file)
    assert json.loads(file.getvalue()) == msgspec.to_builtins(header)


def test_why_says_that_there_was_no_place() -> None:
    """Six GPUs are three workers of two, but each node of three has room for one only."""
    pools, nodes = cluster.uniform(2, 3)
    jobs = [{"work": 20.0, "width": 2 * GPU, "max_workers": 3}, {"work": 10.0, "width": 2 * GPU, "submit_s": 5.0}]
    settings = Settings(placement="pack")
    case = Case(trace=trace_of(jobs), pools=pools, nodes=nodes, policy=load("elastic-fifo"), settings=settings)
    (first, second), outcome = record.why(case, [0, 1])
    assert [(first[0].workers, first[0].sentence), (second[0].workers, second[0].sentence)] == [
        (2, "runs on 2 workers: there was no place for the 3 that were decided"),
        (0, "waits with 2 GPUs free: no nodes have room for 1 worker"),
    ]
    change = outcome.result.changes[0]
    assert (change.job, change.reason, change.first, change.second) == (0, Reason.CUT_TO_ROOM, 2, 3)
