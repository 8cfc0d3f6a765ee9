"""Curves that fall: jobs run at the speed they really have, and figures compare with the best size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policy_checks import run
from strategies import trace_of
from stretto.core.snapshot import GPU
from stretto.sim import bounds, dual_bound, generate, readers
from stretto.sim.fair import fair_finish
from stretto.sim.generate import Workload
from stretto.sim.readers import plain
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

DATA = Path(__file__).parent.parent / "data"
PEAK = [0.0, 10.0, 18.0, 15.0, 12.0, 10.5, 9.0, 7.5, 6.0]
"""Steps/s of a job that is fastest on two workers."""


def falling(folder: Path, text: str, **settings: str) -> Trace:
    path = folder / "jobs.csv"
    path.write_text(f"job_id,submit_s,gpus,duration_s,speedup,work\n{text}\n")
    return readers.read(path, "csv", settings)


def test_at_its_requested_size_a_job_runs_at_its_true_speed(tmp_path: Path) -> None:
    trace = falling(tmp_path, "a,0,8,6000,1:10;2:18;4:12;8:6,36000")
    assert trace.rates[0, 0].tolist() == PEAK
    assert run("fifo", trace, "1x8").finish_s[0] == 6000
    assert run("elastic-fifo", trace_of([{"work": 36_000.0, "min_workers": 8, "max_workers": 8, "rate": PEAK}]), "1x8")
    level = falling(tmp_path, "a,0,8,6000,1:10;2:18;4:12;8:6,36000", falling="false")
    assert level.rates[0, 0].tolist() == [0, 10, *[18] * 7]


def test_a_policy_that_gives_it_more_makes_it_slower() -> None:
    trace = trace_of([{"work": 3_600.0, "min_workers": 4, "max_workers": 4, "rate": PEAK}])
    assert run("elastic-fifo", trace, "1x8").finish_s[0] == 300


def test_learned_it_finds_the_best_size_without_trying_all() -> None:
    """10, 18, 12 and 6 steps/s on 1, 2, 4, 8 workers: 8 are not tried once 4 were slower than 2."""
    trace = trace_of([{"work": 36_000.0, "max_workers": 8, "rate": PEAK}])
    for name in ("stretto", "afs-l"):
        result = run(name, trace, "1x8", world=Settings(curves="learned", record=True))
        sizes = [change.workers for change in result.changes if change.workers]
        assert sizes == [1, 2, 4, 2]
        assert result.finish_s[0] == pytest.approx(30 + 30 + 30 + (36_000 - 30 * 40) / 18)


def test_bounds_and_the_fair_world_use_the_best_size() -> None:
    jobs = [{"work": 1_800.0, "max_workers": 8, "rate": PEAK}, {"work": 1_800.0, "max_workers": 8, "rate": PEAK}]
    trace = trace_of(jobs)
    sizes = bounds.sizes(trace)
    assert sizes.shortest_s.tolist() == [100, 100]
    assert sizes.area_gpu_s.tolist() == [180, 180], "one worker does most per GPU"
    assert fair_finish(trace, 8 * GPU).tolist() == pytest.approx([100, 100]), "neither takes more than two"
    assert fair_finish(trace, 3 * GPU).tolist() == pytest.approx([1_800 / 14] * 2), "1.5 each"
    mixed = trace_of([{"work": 1_800.0, "max_workers": 8, "rate": PEAK}, {"work": 600.0, "max_workers": 8}])
    assert fair_finish(mixed, 8 * GPU).tolist() == pytest.approx([100, 100]), "the other has the six that are left"
    lowest = dual_bound.average_jct(trace, 8, rounds=10, bin_s=10.0)
    assert 0 < lowest <= 100 + 1e-6


@pytest.mark.parametrize(("path", "format"), [("itp/cluster01.csv", "itp"), ("pollux/workload-6.csv", "pollux")])
def test_measured_tables_fall_when_asked(path: str, format: str) -> None:
    file = DATA / path
    rising, true = readers.read(file, format), readers.read(file, format, {"falling": "true"})
    assert (np.diff(rising.rates, axis=2) >= 0).all()
    assert (np.diff(true.rates, axis=2) < 0).any() or format == "itp"
    top = min(rising.rates.shape[2], true.rates.shape[2])
    assert (true.rates[..., :top] <= rising.rates[..., :top] + 1e-9).all()
    assert (true.max_workers >= rising.max_workers).all()
    assert true.duration_s.tolist() == rising.duration_s.tolist()


@pytest.mark.parametrize("curves", ["falls", "peak"])
def test_the_generator_makes_them(tmp_path: Path, curves: str) -> None:
    wanted = generate.parse({"jobs": "60", "gpus": "32", "elastic": "1", "wide": "0.8", "curves": curves})
    with (tmp_path / "made.csv").open("w") as file:
        plain.write(generate.rows(wanted), file)
    trace = readers.read(tmp_path / "made.csv", "csv")
    best = [int(np.argmax(trace.rates[0, trace.curve[j], : trace.max_workers[j] + 1])) for j in range(len(trace))]
    wide = trace.max_workers >= 4
    assert wide.any()
    if curves == "falls":
        assert set(best) == {1}
    else:
        assert all(1 < b < high for b, high in zip(np.array(best)[wide], trace.max_workers[wide], strict=True))
    assert run("fifo", trace, "4x8").finish_s.min() >= trace.duration_s.min()


def test_levels_and_costs_of_the_generator(tmp_path: Path) -> None:
    plain_rows = generate.rows(Workload(jobs=400, elastic=0.5))
    rows = generate.rows(
        Workload(jobs=400, elastic=0.5, rigid=0.2, restart=0.3, checkpoint_s=600, start_s=10, preemptible=0.5)
    )
    shares = [sum(row["level"] == name for row in rows) / 400 for name in ("rigid", "restart", "elastic")]
    assert shares == pytest.approx([0.2, 0.3, 0.5], abs=0.06)
    assert {row.get("preemptible") for row in rows if row["level"] == "rigid"} == {None, "true"}
    assert all(5 <= row["start_s"] <= 15 and 300 <= row["checkpoint_s"] <= 900 for row in rows)
    new = ("level", "preemptible", "start_s", "checkpoint_s")
    assert [{k: v for k, v in row.items() if k not in new} for row in rows] == plain_rows, "the rest is as it was"
