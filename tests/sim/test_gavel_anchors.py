"""Gavel's traces: read right, bounded right, and with the results of Gavel's own simulator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stretto.core.policy import load
from stretto.core.snapshot import GPU
from stretto.errors import StrettoError, TraceError, UsageError
from stretto.sim import cluster, hetero_bound, readers
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace
from stretto.sim.world import Result

DATA = Path(__file__).parents[1] / "data" / "gavel"
CLUSTER = cluster.parse(str(DATA / "cluster_8_16_24.csv"))
EXPECTED = [json.loads(line) for line in (DATA / "expected_48gpu.jsonl").read_text().splitlines()]
TRACES = {name: readers.read(DATA / name, "gavel") for name in ("minimize_makespan.trace", "max_min_fairness.trace")}
SETTINGS = {
    "max_min_fairness": {"objective": "max-min", "perf": False},
    "max_min_fairness_perf": {"objective": "max-min"},
    "min_total_duration": {"objective": "makespan", "perf": False},
    "min_total_duration_perf": {"objective": "makespan"},
    "fifo_perf": {"objective": "fifo"},
    "max_sum_throughput_perf": {"objective": "max-sum-throughput"},
}
BOUND_S = 63749.87


def run(row: dict[str, str], original: bool) -> tuple[Trace, Result]:
    trace = TRACES[row["trace"]]
    return trace, simulate(trace, *CLUSTER, load("gavel", {**SETTINGS[row["policy"]], "original": original}))


# The results.


@pytest.mark.parametrize("row", EXPECTED, ids=lambda row: f"{row['trace']}-{row['policy']}")
def test_results_of_their_simulator(row: dict[str, str]) -> None:
    trace, result = run(row, original=True)
    assert len(trace) == row["n"]
    assert (result.finish_s - trace.submit_s).mean() == pytest.approx(float(row["avg"]), rel=0.05)
    assert result.finish_s.max() == pytest.approx(float(row["makespan"]), rel=0.05)


@pytest.mark.parametrize(
    "row",
    [row for row in EXPECTED if row["policy"].endswith("_perf")],
    ids=lambda row: f"{row['trace']}-{row['policy']}",
)
def test_remembering_what_is_owed_costs_nothing_where_throughputs_are_used(row: dict[str, str]) -> None:
    trace, result = run(row, original=False)
    assert (result.finish_s - trace.submit_s).mean() == pytest.approx(float(row["avg"]), rel=0.05)
    assert result.finish_s.max() == pytest.approx(float(row["makespan"]), rel=0.05)


def test_the_order_of_rows_in_the_cluster_file_does_not_matter() -> None:
    trace, policy = TRACES["max_min_fairness.trace"], load("gavel")
    turned = simulate(trace, *cluster.mixed({"k80": 24, "v100": 8, "p100": 16}), policy)
    assert simulate(trace, *CLUSTER, policy).finish_s == pytest.approx(turned.finish_s, rel=1e-6)


# The bound.


def test_the_bound_of_the_makespan_trace() -> None:
    assert hetero_bound.makespan(TRACES["minimize_makespan.trace"], *CLUSTER) == pytest.approx(BOUND_S, abs=0.01)


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("settings", [{}, {"objective": "makespan"}, {"objective": "max-sum-throughput"}])
def test_the_bound_is_never_beaten(name: str, settings: dict[str, str]) -> None:
    bound = hetero_bound.makespan(TRACES[name], *CLUSTER)
    assert bound <= simulate(TRACES[name], *CLUSTER, load("gavel", settings)).finish_s.max()
    assert bound <= simulate(TRACES[name], *CLUSTER, load("fifo")).finish_s.max()


def two_pools(jobs: list[tuple[float, float, float]], submit_s: list[float] | None = None) -> Trace:
    """Jobs of one GPU: work, steps/s on pool `a` and on pool `b`."""
    rates = np.array([[[0.0, job[1 + pool]] for job in jobs] for pool in (0, 1)])
    n = len(jobs)
    return Trace.build(
        "two", [str(i) for i in range(n)], submit_s or [0.0] * n, [1] * n, [job[0] / max(job[1:]) for job in jobs],
        work=[job[0] for job in jobs], curve=list(range(n)), rates=rates, pools=("a", "b"),
    )  # fmt: skip


def test_bounds_by_hand() -> None:
    one_of_each = cluster.mixed({"a": 1, "b": 1})
    # Alone: on the faster type all of the time.
    assert hetero_bound.makespan(two_pools([(100.0, 2.0, 1.0)]), *one_of_each) == pytest.approx(50)
    # Three alike on two equal GPUs share them.
    assert hetero_bound.makespan(two_pools([(100.0, 1.0, 1.0)] * 3), *one_of_each) == pytest.approx(150)
    # Opposite strengths: each on its own type.
    assert hetero_bound.makespan(two_pools([(90.0, 3.0, 1.0), (60.0, 1.0, 2.0)]), *one_of_each) == pytest.approx(30)
    # What comes late ends late.
    late = two_pools([(10.0, 1.0, 1.0), (100.0, 2.0, 1.0)], [0.0, 1000.0])
    assert hetero_bound.makespan(late, *one_of_each) == pytest.approx(1050)


def test_the_bound_is_no_larger_than_any_split_of_a_grid() -> None:
    """Two jobs, two types, hundredths of each job's work on type `a`; a job is on one type at a time."""
    jobs = [(120.0, 4.0, 1.0), (80.0, 2.0, 1.5)]
    part = np.linspace(0, 1, 101)
    times = [(part * w / a, (1 - part) * w / b) for w, a, b in jobs]
    (a0, b0), (a1, b1) = [(t[0][:, None], t[1][:, None]) if i == 0 else t for i, t in enumerate(times)]
    best = np.maximum.reduce([a0 + a1, b0 + b1, a0 + b0 + 0 * a1, a1 + b1 + 0 * a0]).min()
    bound = hetero_bound.makespan(two_pools(jobs), *cluster.mixed({"a": 1, "b": 1}))
    assert 0.98 * best <= bound <= best


def test_a_bound_with_elastic_jobs_uses_the_best_size() -> None:
    """10 steps; 1 step/s on one GPU, 1.5 on two: two such jobs on two GPUs are done soonest on one each."""
    rates = np.array([[[0.0, 1.0, 1.5]]])
    trace = Trace.build(
        "elastic", ["0", "1"], [0, 0], [1, 1], [10, 10], work=[10, 10], curve=[0, 0], rates=rates, max_workers=[2, 2],
    )  # fmt: skip
    assert hetero_bound.makespan(trace, *cluster.uniform(1, 2)) == pytest.approx(10)
    assert hetero_bound.makespan(trace, *cluster.uniform(1, 4)) == pytest.approx(20 / 3)


# Reading.


def test_what_is_read() -> None:
    trace = TRACES["max_min_fairness.trace"]
    assert trace.pools == ("v100", "p100", "k80")
    assert trace.ids[:2] == ("1", "2")
    assert trace.requested[:2].tolist() == [4, 2]
    assert np.array_equal(trace.min_workers, trace.max_workers)
    assert trace.work[0] == 925982
    assert trace.duration_s[0] == pytest.approx(trace.work[0] / trace.rates[0, trace.curve[0], 4])
    assert (trace.rates[:, trace.curve[0], :4] == 0).all()
    assert (np.diff(trace.submit_s) >= 0).all()
    assert np.isinf(trace.deadline_s).all()


def test_every_policy_runs_at_the_speed_of_the_device_type_it_is_given() -> None:
    trace = TRACES["minimize_makespan.trace"]
    alone = simulate(trace, *cluster.mixed({"k80": 1000}), load("fifo"))
    speed = trace.rates[2, trace.curve, trace.requested]
    assert alone.finish_s == pytest.approx(trace.work / speed)


LINE = "A3C\tcommand\tfolder\t--steps\t1\t1000\t1\t1\t{slo}\t{arrival}\n"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "some.trace"
    path.write_text("".join(lines))
    return path


def test_deadlines_are_multiples_of_the_duration(tmp_path: Path) -> None:
    trace = readers.read(write(tmp_path, LINE.format(slo=2, arrival=100), LINE.format(slo=-1, arrival=0)), "gavel")
    assert trace.deadline_s.tolist() == pytest.approx([np.inf, 100 + 2 * trace.duration_s[1]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A3C\tcommand\tfolder\t--steps\t1\t1000\t1\n", "row 2: 7 columns instead of 10"),
        (LINE.format(slo=-1, arrival="soon"), "row 2: arrival is 'soon'"),
        (LINE.format(slo=-1, arrival="nan"), "row 2: arrival is 'nan'"),
        (LINE.replace("1000\t1\t1", "1000\t1.5\t1").format(slo=-1, arrival=0), "row 2: scale factor is '1.5'"),
        (LINE.replace("1000\t1\t1", "1000\t0\t1").format(slo=-1, arrival=0), "no throughput for 'A3C' on 0 GPUs"),
        (LINE.replace("1000\t1\t1", "-5\t1\t1").format(slo=-1, arrival=0), "row 2 .*duration"),
        (LINE.replace("A3C", "GPT-9").format(slo=-1, arrival=0), "row 2: no throughput for 'GPT-9' on 1 GPUs"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        readers.read(write(tmp_path, LINE.format(slo=-1, arrival=0), line), "gavel")


def test_an_empty_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no jobs"):
        readers.read(write(tmp_path), "gavel")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(TraceError, match="not a text file"):
        readers.read(tmp_path / "binary", "gavel")


def test_other_throughputs(tmp_path: Path) -> None:
    table = {
        "slow": {"('A3C', 1)": {"null": 1.0, "('A3C', 1)": [0.5, 0.5]}},
        "fast": {"('A3C', 1)": {"null": 4.0}},
        "fast_unconsolidated": {"('A3C', 1)": {"null": 3.0}},
    }
    speeds = tmp_path / "speeds.json"
    speeds.write_text(json.dumps(table))
    trace = readers.read(write(tmp_path, LINE.format(slo=-1, arrival=0)), "gavel", {"throughputs": str(speeds)})
    assert trace.pools == ("fast", "slow")
    assert trace.duration_s.tolist() == [250.0]
    assert trace.need_milli.tolist() == [GPU]


@pytest.mark.parametrize("text", ["{", "[]", '{"v100": {"A3C": {"null": 1}}}', '{"v100": {"(\'A3C\', 1)": {}}}'])
def test_bad_throughputs_are_named(tmp_path: Path, text: str) -> None:
    speeds = tmp_path / "speeds.json"
    speeds.write_text(text)
    with pytest.raises(StrettoError, match=r"speeds\.json"):
        readers.read(write(tmp_path, LINE.format(slo=-1, arrival=0)), "gavel", {"throughputs": str(speeds)})
    with pytest.raises(UsageError, match="does not exist"):
        readers.read(write(tmp_path, LINE.format(slo=-1, arrival=0)), "gavel", {"throughputs": str(tmp_path / "no")})
