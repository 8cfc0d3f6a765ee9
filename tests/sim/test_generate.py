"""The generator keeps to what it was asked for, and to its seed."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from stretto.errors import UsageError
from stretto.sim import generate, readers
from stretto.sim.generate import Workload
from stretto.sim.readers import plain
from stretto.sim.trace import Trace


def text_of(wanted: Workload) -> str:
    out = io.StringIO()
    plain.write(generate.rows(wanted), out)
    return out.getvalue()


def trace_of(folder: Path, wanted: Workload) -> Trace:
    path = folder / "made.csv"
    path.write_text(text_of(wanted))
    return readers.read(path, "csv")


def test_same_seed_same_bytes() -> None:
    wanted = Workload(jobs=50, elastic=0.5, deadlines=0.5, services=2, priorities=3, seed=7)
    assert text_of(wanted) == text_of(wanted)
    assert text_of(wanted) != text_of(Workload(jobs=50, elastic=0.5, deadlines=0.5, services=2, priorities=3, seed=8))


@pytest.mark.parametrize("sizes", ["lognormal", "pareto"])
def test_load_and_median_are_as_asked(tmp_path: Path, sizes: str) -> None:
    wanted = generate.parse({"jobs": "4000", "gpus": "64", "load": "0.7", "sizes": sizes, "shape": "1.5"})
    trace = trace_of(tmp_path, wanted)
    offered = (trace.duration_s * trace.requested).sum() / trace.submit_s.max() / 64
    assert offered == pytest.approx(0.7, rel=0.1)
    assert np.median(trace.duration_s) == pytest.approx(1200, rel=0.15)
    assert (trace.requested == 1).mean() == pytest.approx(0.93, abs=0.02), "as in Philly"


def test_shares(tmp_path: Path) -> None:
    wanted = Workload(jobs=2000, gpus=16, elastic=0.3, deadlines=0.6, priorities=4, wide=0.5)
    trace = trace_of(tmp_path, wanted)
    assert (trace.min_workers < trace.max_workers).mean() == pytest.approx(0.3, abs=0.04)
    due = np.isfinite(trace.deadline_s)
    assert due.mean() == pytest.approx(0.6, abs=0.04)
    slack = (trace.deadline_s - trace.submit_s)[due] / trace.duration_s[due]
    assert slack.min() >= 1.1
    assert slack.max() <= 3.1
    assert set(trace.priority.tolist()) == {0, 1, 2, 3}
    assert (trace.requested > 1).mean() == pytest.approx(0.5, abs=0.04)
    assert trace.max_workers.max() <= 16


def test_services_follow_the_day(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, Workload(jobs=300, gpus=8, load=0.2, services=1, replicas=8))
    load = next(load for load in trace.services if load is not None)
    hour = (load.at_s / 3600).astype(int) % 24
    assert load.wanted[hour == 12].max() == 8
    assert load.wanted[hour == 0].min() == 4
    assert sum(load is not None for load in trace.services) == 1


def test_a_share_changes_only_whom_it_concerns() -> None:
    few = {row["job_id"]: row for row in generate.rows(Workload(jobs=200, elastic=0.2))}
    many = {row["job_id"]: row for row in generate.rows(Workload(jobs=200, elastic=0.9))}
    for job, row in few.items():
        assert row["submit_s"] == many[job]["submit_s"]
        assert "speedup" not in row or row["speedup"] == many[job]["speedup"]


@pytest.mark.parametrize(
    "settings",
    [
        {"jobs": "0"},
        {"jobs": "x"},
        {"load": "0"},
        {"load": "nan"},
        {"elastic": "1.5"},
        {"gpus": "-1"},
        {"sizes": "normal"},
        {"median_s": "inf"},
        {"replicas": "99"},
        {"seed": "-1"},
        {"jbos": "5"},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        generate.parse(settings)
