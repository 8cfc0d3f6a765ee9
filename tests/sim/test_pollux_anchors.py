"""The Pollux workloads: what the reader makes of the measurements, and the authors' own results reproduced."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from strategies import job, view_of
from stretto.core.policy import load
from stretto.core.snapshot import FloatArray
from stretto.errors import TraceError
from stretto.sim import cluster, readers
from stretto.sim.engine import simulate
from stretto.sim.readers import pollux_model
from stretto.sim.readers.pollux_model import Application, fewest_nodes
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

DATA = Path(__file__).parent.parent / "data" / "pollux"
WORKLOAD = DATA / "workload-6.csv"
WORLD = Settings(start_s=30.0, resize_s=30.0, slot_s=60.0, placement="pack")
APPS = pollux_model.load()


def expected(policy: str) -> FloatArray:
    with (DATA / "expected-6.csv").open(newline="") as file:
        return np.array([float(line[policy]) for line in csv.DictReader(file)])


def completion_s(policy: str, options: dict[str, str], reader: dict[str, str]) -> FloatArray:
    trace = readers.read(WORKLOAD, "pollux", reader)
    result = simulate(trace, *cluster.parse("16x4"), load(policy, options), WORLD)
    return result.finish_s - trace.submit_s


# The authors' results: 160 jobs on 16 nodes of 4 GPUs, rounds of 60 s, 30 s at every change.

TIRESIAS = {"queues": "57600", "running_first": "false"}
OPTIMUS = {"round_s": "60", "look_ahead": "false"}
POLLUX = {"population": "20", "generations": "10"}


@pytest.mark.parametrize(
    ("policy", "options", "reader", "average", "within"),
    [
        ("tiresias", TIRESIAS, {}, 3469.69375, 0.02),
        ("optimus", OPTIMUS, {}, 5301.875, 0.05),
        ("pollux", POLLUX, {"batch": "adaptive"}, 2446.13125, 0.10),
    ],
)
def test_average_completion_time(
    policy: str, options: dict[str, str], reader: dict[str, str], average: float, within: float
) -> None:
    theirs = expected(policy)
    assert theirs.mean() == average
    ours = completion_s(policy, options, reader)
    assert ours.mean() == pytest.approx(average, rel=within)
    assert np.percentile(ours, 99) == pytest.approx(np.percentile(theirs, 99), rel=0.15)


def test_most_jobs_end_in_the_same_second_when_epochs_are_counted_in_whole_seconds() -> None:
    """The rest ran beside others: the authors place on the node with the most room, we on that with the least."""
    ours = completion_s("tiresias", TIRESIAS, {"whole_seconds": "true"})
    assert (np.abs(ours - expected("tiresias")) < 0.5).sum() >= 90


# What the authors' own versions of the other policies do differently.


@pytest.mark.parametrize(("running_first", "start"), [("true", 20.0), ("false", 10.0)])
def test_an_older_waiting_job_may_displace_a_running_one_of_its_queue(running_first: str, start: float) -> None:
    """The second needs both GPUs; when the first ends at 10, the third holds one of them until 20."""
    sizes = [(0.0, 1, 10.0), (1.0, 2, 5.0), (2.0, 1, 18.0)]
    trace = Trace.build("three", ["a", "b", "c"], *map(list, zip(*sizes, strict=True)))
    policy = load("tiresias", {"queues": "57600", "running_first": running_first})
    assert simulate(trace, *cluster.parse("1x2"), policy).start_s[1] == start


@pytest.mark.parametrize(("look_ahead", "workers"), [("true", 3), ("false", 1)])
def test_without_looking_ahead_a_plateau_ends_growth(look_ahead: str, workers: int) -> None:
    view = view_of(4, [job(max_workers=4, rate=[0, 1, 1, 4], remaining=100)])
    assert load("optimus", {"look_ahead": look_ahead}).decide(view, None).workers.tolist() == [workers]


# What is made of the measurements.


def slow_duration(app: Application, batch: int, workers: int) -> float:
    """One job at a fixed size on measured nodes, epoch by epoch."""
    share = math.ceil(batch / workers)
    passes = math.ceil(share / app.local_max)
    if workers == 1 and batch > app.initial:
        passes = max(passes, 2)
    local = min(math.ceil(share / passes), app.largest // (workers * passes))
    measured = app.steps[fewest_nodes(workers), workers]
    step = float(np.interp(local, measured.local, measured.step_s))
    compute = step - float(np.interp(local, measured.local, measured.sync_s))
    total, scale = local * passes * workers, local * passes * workers / app.initial
    seconds = 0.0
    for epoch, work in enumerate(app.work.tolist()):
        sqr = float(np.interp(total, app.batches, app.grad_sqr[:, epoch]))
        var = float(np.interp(total, app.batches, app.grad_var[:, epoch]))
        seconds += work / ((var + sqr) / (var / scale + sqr)) * (step + (passes - 1) * compute)
    return seconds


@pytest.mark.parametrize(
    ("name", "batch", "workers"),
    [("cifar10", 2048, 6), ("cifar10", 128, 1), ("bert", 384, 16), ("bert", 384, 1), ("imagenet", 6400, 32),
     ("deepspeech2", 640, 12), ("yolov3", 64, 4), ("yolov3", 300, 7), ("ncf", 32768, 1), ("imagenet", 5000, 48)],
)  # fmt: skip
def test_duration_is_that_of_an_epoch_by_epoch_run(name: str, batch: int, workers: int) -> None:
    table = pollux_model.fixed_s(APPS[name], batch)
    assert table[workers, fewest_nodes(workers)] == pytest.approx(slow_duration(APPS[name], batch, workers))


def test_step_times_between_measured_places_lie_between_them() -> None:
    app = APPS["imagenet"]
    split = app.split(np.array([3200.0]), 20)
    four, five, six = (float(app.step_s(split, n, nodes)[0]) for n, nodes in ((16, 4), (20, 5), (24, 6)))
    assert five == pytest.approx((four + six) / 2)


@pytest.mark.parametrize("name", ["bert", "yolov3", "deepspeech2"])
def test_an_adapted_batch_is_never_worse_than_a_fixed_one(name: str) -> None:
    app = APPS[name]
    best_s = (app.work[:, None, None] / np.maximum(pollux_model.best_goodput(app), 1e-12)).sum(axis=0)
    for batch in app.batches.astype(int).tolist():
        fixed_s = pollux_model.fixed_s(app, batch)
        for workers in range(1, app.most_workers(batch) + 1):
            # Only fifty batches are tried.
            assert (best_s[workers, 1:] <= 1.03 * fixed_s[workers, 1:]).all(), (batch, workers)


@pytest.fixture(scope="module")
def fixed() -> Trace:
    return readers.read(WORKLOAD, "pollux")


@pytest.fixture(scope="module")
def adaptive() -> Trace:
    return readers.read(WORKLOAD, "pollux", {"batch": "adaptive"})


def test_the_workload_keeps_its_clock(fixed: Trace) -> None:
    assert len(fixed) == 160
    assert fixed.ids[0] == "cifar10-0"
    assert fixed.submit_s[0] == 53.0
    assert fixed.requested[:4].tolist() == [6, 6, 8, 16]


def test_both_kinds_of_batch_are_valid_curves(fixed: Trace, adaptive: Trace) -> None:
    for trace in (fixed, adaptive):
        assert (trace.rates[..., 0] == 0).all()
        assert (np.diff(trace.rates, axis=2) >= 0).all()
        assert trace.spread_rates is not None
        assert trace.spread_rates.shape[:3] == trace.rates.shape
        assert (trace.best_rates >= trace.rates.max(axis=0)).all()
    assert fixed.duration_s.tolist() == adaptive.duration_s.tolist()
    assert not fixed.phases
    assert [len(work) for work, _ in adaptive.phases[:4]] == [100, 100, 80, 100]


def test_rigid_jobs_take_their_duration_and_slow_down_where_they_are_spread(fixed: Trace) -> None:
    rigid = fixed.rigid()
    j = fixed.ids.index(next(name for name in fixed.ids if name.startswith("yolov3")))
    n, curve = int(fixed.requested[j]), int(rigid.curve[j])
    assert rigid.work[j] == fixed.duration_s[j]
    assert rigid.spread_rates is not None
    assert fixed.spread_rates is not None
    together, apart = rigid.spread_rates[0, curve, n, [1, 2]].tolist()
    assert together == 1.0
    by_nodes = fixed.spread_rates[0, fixed.curve[j], n]
    assert apart == pytest.approx(by_nodes[2] / by_nodes[1])
    assert apart < 0.6


def test_only_ncf_stays_on_one_worker(fixed: Trace, adaptive: Trace) -> None:
    for trace in (fixed, adaptive):
        alone = {name.split("-")[0] for name, most in zip(trace.ids, trace.max_workers, strict=True) if most == 1}
        assert alone == {"ncf"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("a,1,gpt,1,8", "application 'gpt'"),
        ("a,1,bert,1,6", "batch_size is 6"),
        ("a,1,bert,1,1000", "batch_size is 1000"),
        ("a,1,bert,65,384", "num_replicas is 65"),
        ("a,1,bert,1,x", "batch_size is 'x'"),
        ("a,1,bert,0,384", "num_replicas is 0"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"name,time,application,num_replicas,batch_size\nfirst,0,bert,1,384\n{line}\n")
    with pytest.raises(TraceError) as error:
        readers.read(path, "pollux")
    assert what in str(error.value)
    assert "row 3" in str(error.value)
