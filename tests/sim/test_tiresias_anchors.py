"""The results of Tiresias' own simulator, to the last digit, and what changes where its quirks are left out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.core.policy import load
from stretto.sim import cluster, engine, general, readers
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings

DATA = Path(__file__).parent.parent / "data" / "tiresias"

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "fifo": ("fifo", {}),
    "fjf": ("fit-first", {}),
    "sjf": ("sjf", {}),
    "shortest": ("srtf", {}),
    "shortest-gpu": ("srsf", {}),
    "dlas": ("tiresias", {"queues": "3250,7200", "service": "time"}),
    "dlas-gpu": ("tiresias", {"queues": "3250,7200"}),
    "dlas-gpu-1": ("tiresias", {"queues": "3250,7200", "promote": "1"}),
    "dlas-gpu-8": ("tiresias", {"queues": "3250,7200", "promote": "8"}),
    "dlas-gpu-gittins": ("tiresias-gittins", {"queues": "3250,7200"}),
}


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


ANCHORS = rows("anchors.csv")
PER_JOB = [
    (trace, gpus, schedule)
    for trace, gpus in (("60_job", 8), ("60_job", 16), ("ef_c06", 128))
    for schedule in rows(f"jct_{trace}_{gpus}.csv")[0]
    if schedule != "job_id"
]


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: readers.read(DATA / f"{name}.csv", "tiresias") for name in ("60_job", "ef_c06")}


def simulate(trace: Trace, gpus: int, name: str, **options: Any) -> Result:
    pools, nodes = cluster.uniform(gpus, 1)
    return engine.simulate(trace, pools, nodes, load(name, options))


def summary(trace: Trace, result: Result) -> dict[str, str]:
    jct_s = result.finish_s - trace.submit_s
    return {
        "avg": f"{jct_s.mean():.3f}",
        "p50": f"{np.percentile(jct_s, 50):.1f}",
        "p99": f"{np.percentile(jct_s, 99):.2f}",
        "max": f"{jct_s.max():.0f}",
        "makespan": f"{result.finish_s.max() - trace.submit_s.min():.0f}",
        "preemptions": str(result.preemptions.sum()),
    }


@pytest.mark.parametrize("row", ANCHORS, ids=[f"{row['trace']}-{row['gpus']}-{row['policy']}" for row in ANCHORS])
def test_every_row_to_the_last_digit(traces: dict[str, Trace], row: dict[str, str]) -> None:
    trace = traces[row["trace"]]
    name, options = SCHEDULES[row["policy"]]
    found = summary(trace, simulate(trace, int(row["gpus"]), name, original=True, **options))
    assert found == {key: row[key] for key in found}


@pytest.mark.parametrize(("trace_name", "gpus", "schedule"), PER_JOB)
def test_every_job(traces: dict[str, Trace], trace_name: str, gpus: int, schedule: str) -> None:
    trace = traces[trace_name]
    name, options = SCHEDULES[schedule]
    result = simulate(trace, gpus, name, original=True, **options)
    expected = {row["job_id"]: float(row[schedule]) for row in rows(f"jct_{trace_name}_{gpus}.csv")}
    assert dict(zip(trace.ids, (result.finish_s - trace.submit_s).tolist(), strict=True)) == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_general_engine_agrees(traces: dict[str, Trace], schedule: str) -> None:
    name, options = SCHEDULES[schedule]
    trace, policy = traces["60_job"].rigid(), load(name, {**options, "original": True})
    pools, nodes = cluster.uniform(8, 1)
    result = general.Engine(trace, pools, nodes, policy, Settings()).run()
    expected = [float(row[schedule]) for row in rows("jct_60_job_8.csv")]
    assert (result.finish_s - trace.submit_s).tolist() == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("original", [True, False])
def test_without_contention_every_schedule_is_the_same(traces: dict[str, Trace], schedule: str, original: bool) -> None:
    name, options = SCHEDULES[schedule]
    trace = traces["60_job"]
    result = simulate(trace, 128, name, original=original, **options)
    assert (result.finish_s - trace.submit_s).tolist() == trace.duration_s.tolist()
    found = summary(trace, result)
    assert (found["avg"], found["p99"], found["makespan"]) == ("178.417", "1054.24", "3271")


def test_options_default_to_those_of_the_authors(traces: dict[str, Trace]) -> None:
    for name in ("tiresias", "tiresias-gittins"):
        plain = simulate(traces["60_job"], 8, name, original=True)
        given = simulate(traces["60_job"], 8, name, original=True, queues=(3250, 7200))
        assert plain.finish_s.tolist() == given.finish_s.tolist()


def test_the_corrected_crossing_time(traces: dict[str, Trace]) -> None:
    """Wide jobs are demoted when they reach the limit, not when somebody happens to look."""
    trace = traces["ef_c06"]
    found = summary(trace, simulate(trace, 128, "tiresias", queues=(3250, 7200)))
    assert (found["avg"], found["makespan"]) == ("37687.843", "5183641")


def test_corrected_ties_matter_for_srsf_only(traces: dict[str, Trace]) -> None:
    trace = traces["60_job"]
    for name in ("fifo", "fit-first", "sjf", "srtf"):
        original, corrected = (simulate(trace, 16, name, original=flag) for flag in (True, False))
        assert original.finish_s.tolist() == corrected.finish_s.tolist()
    assert summary(trace, simulate(trace, 16, "srsf"))["avg"] == "194.983"
