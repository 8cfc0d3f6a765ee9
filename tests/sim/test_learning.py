"""Policies that are told what was learned instead of the truth: right in the end, careful until then, never illegal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import run, watched
from strategies import job, trace_of, traces, view_of
from stretto.core.decision import Decision
from stretto.core.policies import BUILTIN
from stretto.core.policy import load
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim import cluster, runner
from stretto.sim.engine import simulate
from stretto.sim.learning import Learner, learner
from stretto.sim.trace import Trace
from stretto.sim.world import Failure, Result, Settings

CHEAP: dict[str, dict[str, Any]] = {"pollux": {"population": 8, "generations": 5}}
BY_GAIN = ("stretto", "afs-l", "optimus", "elastic-fifo", "elastic-srtf", "elastic-tiresias")
"""Elastic policies that give nobody a worker without a gain."""


def watch(name: str, trace: Trace, world: Settings, nodes: str = "1x8") -> list[tuple[Snapshot, Decision]]:
    """Everything the policy was asked and answered."""
    log: list[tuple[Snapshot, Decision]] = []
    simulate(trace, *cluster.parse(nodes), watched(name, log), world)
    return log


def sizes(result: Result, number: int = 0) -> list[int]:
    """The workers that a job had, one after the other."""
    return [change.workers for change in result.changes if change.job == number]


# Curves.


def shapes() -> st.SearchStrategy[list[float]]:
    """Speeds on 1, 2, … workers: more are never slower, and the first makes progress."""
    gains = st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0]), max_size=9)
    return st.tuples(st.sampled_from([0.01, 1.0, 40.0]), gains).map(
        lambda drawn: (drawn[0] * np.cumsum([1.0, *drawn[1]])).tolist()
    )


def believed(speeds: list[float], seen: list[int], world: Settings) -> list[float]:
    """What is believed of a job that ran at these sizes, for three hours each."""
    learns = Learner(world)
    top = len(speeds)
    for turn, n in enumerate([*seen, 0]):
        start_s = turn * 10_000.0
        one = job(rate=[0.0, *speeds], max_workers=top, workers=n, changed_s=start_s)
        view = view_of(16, [one], now_s=start_s + 9_999.0)
        found = learns.seen(view, view.rate(view.workers))
    rates: list[float] = found.rates[0, found.curve[0], 1 : top + 1].tolist()
    return rates


@given(speeds=shapes())
def test_measured_at_every_size_without_error_it_is_the_truth(speeds: list[float]) -> None:
    speeds = speeds if len(speeds) > 1 else [*speeds, speeds[0]]
    every = list(range(1, len(speeds) + 1))
    assert believed(speeds, every, Settings(curves="learned")) == pytest.approx(speeds, rel=1e-3)
    wrong = believed(speeds, every, Settings(curves="learned", observe_sd=0.2, seed=3))
    assert wrong != pytest.approx(speeds, rel=1e-3)
    assert wrong == pytest.approx(speeds, rel=0.3)


def test_beyond_twice_the_widest_size_nothing_is_promised() -> None:
    linear = [float(n) for n in range(1, 17)]
    world = Settings(curves="learned")
    assert believed(linear, [], world)[:4] == [1, 1, 1, 1]
    assert believed(linear, [1], world)[:4] == pytest.approx([1, 2**0.7, 2**0.7, 2**0.7])
    assert believed(linear, [1, 2], world)[1:6] == pytest.approx([2, 3, 4, 4, 4], rel=1e-3)
    assert believed(linear, [1, 2, 4], world)[6:9] == pytest.approx([7, 8, 8])


@pytest.mark.parametrize("name", BY_GAIN)
@settings(max_examples=12)
@given(knee=st.integers(1, 16))
def test_a_job_explores_by_doubling_until_the_gain_stops(name: str, knee: int) -> None:
    speeds = [float(min(n, knee)) for n in range(17)]
    trace = trace_of([{"work": 20_000.0, "max_workers": 16, "rate": speeds}])
    result = run(name, trace, "2x8", world=Settings(curves="learned", record=True))
    had = sizes(result)
    doubled = [1]
    while doubled[-1] < knee:
        doubled.append(2 * doubled[-1])
    most = doubled[-1]
    way = doubled + [n for n in (2 * most, 4 * most) if n <= 16]
    assert had[: len(way)] == way, "no step is left out, and two without gain are enough"
    between = set(had[len(way) :]) - set(way)
    assert all(knee < n < 2 * most for n in between), "only sizes beside the best one are tried then"
    assert len(between) <= 2
    assert had[-1] <= most, "it ends where fewer would be slower, as far as was tried"
    assert speeds[had[-1]] == knee


@pytest.mark.parametrize("name", BY_GAIN)
@settings(max_examples=12)
@given(knee=st.integers(1, 16))
def test_without_exploring_policies_look_for_gain_by_themselves(name: str, knee: int) -> None:
    """One doubling beyond what was measured is promised a gain, so each in turn is tried until one brings none."""
    speeds = [float(min(n, knee)) for n in range(17)]
    trace = trace_of([{"work": 20_000.0, "max_workers": 16, "rate": speeds}])
    had = sizes(run(name, trace, "2x8", world=Settings(curves="learned", explore=False, record=True)))
    doubled = [1]
    while doubled[-1] < knee:
        doubled.append(2 * doubled[-1])
    assert had[: len(doubled)] == doubled, "no step is left out"
    assert max(had) <= min(2 * doubled[-1], 16), "and none is made after the gain has stopped"
    assert speeds[had[-1]] == knee, "it stays where it is fastest"


@pytest.mark.parametrize("name", BY_GAIN)
def test_a_new_size_is_tried_as_soon_as_the_last_one_was_measured(name: str) -> None:
    trace = trace_of([{"work": 20_000.0, "max_workers": 8}])
    world = Settings(curves="learned", observe_s=50.0, resize_s=2.0, start_s=7.0, record=True)
    result = run(name, trace, "2x8", world=world)
    grown = [(change.at_s, change.workers) for change in result.changes if change.workers]
    assert grown == [(0.0, 1), (57.0, 2), (114.0, 4), (171.0, 8)]


def test_what_a_finished_job_taught_holds_for_the_next_of_its_model() -> None:
    speeds = [0.0, 30.0, 50.0, 60.0, 65.0]
    first = {"work": 50_000.0, "max_workers": 4, "rate": speeds}
    trace = trace_of([first, {**first, "submit_s": 5_000.0}])
    alike = msgspec.structs.replace(trace, curve=np.zeros(2, np.int64))
    other = msgspec.structs.replace(trace, klass=np.array([0, 1]), classes=("a", "b"))
    for jobs, start in ((alike, 4), (trace, 1), (other, 1)):
        result = run("afs-l", jobs, world=Settings(curves="learned", record=True))
        assert sizes(result, 0)[:3] == [1, 2, 4]
        assert sizes(result, 1)[0] == start
    views = [view for view, _ in watch("afs-l", alike, Settings(curves="learned"))]
    new = next(view for view in views if view.job.tolist() == [1])
    assert new.rates[0, 0].tolist() == pytest.approx(speeds, rel=0.05)


def test_jobs_of_one_size_keep_their_curve() -> None:
    trace = trace_of([{"work": 100.0, "requested": 4, "min_workers": 4, "max_workers": 4, "rate": [0, 0, 0, 0, 3.0]}])
    for view, _ in watch("stretto", trace, Settings(curves="learned")):
        assert view.rates[0, view.curve[0]].tolist() == [0, 0, 0, 0, 3]


def test_phases_of_jobs_of_one_size_are_told_as_well() -> None:
    one = {"work": 300.0, "requested": 1, "max_workers": 1, "rate": [0.0, 1.0]}
    trace = trace_of([one, {**one, "rate": [0.0, 2.0], "submit_s": 150.0, "work": 20.0}])
    phases = ((np.array([100.0, 200.0]), np.array([0, 1])), (np.array([20.0]), np.array([1])))
    trace = msgspec.structs.replace(trace, phases=phases)
    told = [view.rates[0, view.curve[0], 1] for view, _ in watch("stretto", trace, Settings(curves="learned"))]
    assert told[0] == 1
    assert told[-1] == 2


# Lengths.


def test_lengths_are_judged_by_finished_jobs_of_the_class() -> None:
    """Four jobs of 500 s, one after the other, then one more; and a stranger of which nobody knows anything."""
    past = [{"work": 500.0, "submit_s": 1_000.0 * n} for n in range(4)]
    trace = trace_of([*past, {"work": 500.0, "submit_s": 9_000.0}])
    log = watch("srtf", trace, Settings(lengths="estimated"))
    first = {int(view.job[0]): view for view, _ in reversed(log)}
    assert first[0].remaining[0] == pytest.approx(3600 * math.exp(1.5**2 / 2))
    assert first[0].remaining_sd[0] == 1.5
    assert first[4].remaining[0] == pytest.approx(500, rel=0.01)
    assert first[4].remaining_sd[0] < 0.1
    stranger = msgspec.structs.replace(trace, klass=np.array([0, 0, 0, 0, 1]), classes=("a", "b"))
    told = next(view for view, _ in watch("srtf", stranger, Settings(lengths="estimated")) if view.job[0] == 4)
    assert told.remaining[0] == pytest.approx(500, rel=0.01), "a new class is judged by everyone"


def test_a_job_that_outlives_the_others_is_expected_to_go_on() -> None:
    past = [{"work": 100.0 + n, "submit_s": 1_000.0 * n} for n in range(4)]
    later = [{"work": 100.0, "submit_s": 10_000.0 + 300.0 * n} for n in range(5)]
    trace = trace_of([*past, {"work": 2_000.0, "submit_s": 9_000.0}, *later])
    told = [
        float(view.remaining[0])
        for view, _ in watch("fifo", trace, Settings(lengths="estimated"))
        if view.job[0] == 4 and view.workers[0]
    ]
    assert len(told) > 3
    assert all(left > 0 for left in told)
    assert told[-1] == pytest.approx(2_000, rel=0.3), "as long again as it has lasted"


def test_what_users_wrote_down_tells_sizes_apart() -> None:
    """Jobs with a deadline far away have always been long ones."""
    long, short = {"work": 2_000.0}, {"work": 20.0}
    trace = trace_of([{**(long if n % 2 else short), "submit_s": 3_000.0 * n} for n in range(16)])
    due = trace.submit_s + np.where(np.arange(16) % 2, 4_000.0, 60.0)
    trace = msgspec.structs.replace(trace, deadline_s=due)
    log = watch("fifo", trace, Settings(lengths="estimated"))
    told = {int(view.job[0]): float(view.remaining[0]) for view, _ in reversed(log)}
    assert told[14] == pytest.approx(20, rel=0.3)
    assert told[15] == pytest.approx(2_000, rel=0.3)


# Always.


def check(trace: Trace, result: Result, gpus: int) -> None:
    """Every job ends, at legal sizes, and never is more given out than there is."""
    assert np.isfinite(result.finish_s[~result.rejected]).all()
    held = np.zeros(len(trace), np.int64)
    for i, change in enumerate(result.changes):
        low, high = trace.min_workers[change.job], trace.max_workers[change.job]
        assert change.workers == 0 or low <= change.workers <= high
        held[change.job] = change.workers
        together = i + 1 < len(result.changes) and result.changes[i + 1].at_s == change.at_s
        ended = np.nan_to_num(result.finish_s, nan=math.inf) <= change.at_s
        assert together or int((held * trace.width)[~ended].sum()) <= gpus * GPU


learned_worlds = st.builds(
    Settings,
    curves=st.sampled_from(["true", "learned"]),
    lengths=st.sampled_from(["known", "estimated", "unknown"]),
    observe_s=st.sampled_from([1.0, 7.0, 100.0]),
    observe_sd=st.sampled_from([0.0, 0.2]),
    resize_s=st.sampled_from([0.0, 0.5]),
    start_s=st.sampled_from([0.0, 5.0]),
    failures=st.sampled_from([(), (Failure(20.0, 1), Failure(60.0, 1, True))]),
    record=st.just(True),
    seed=st.integers(0, 3),
)


@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=10)
@given(trace=traces(max_jobs=6, urgent=True), world=learned_worlds)
def test_every_policy_stays_legal_and_repeats(name: str, trace: Trace, world: Settings) -> None:
    """The simulator checks the invariants of every decision; the result is the same when it is done again."""
    if world.failures:
        # On nodes of eight no job is too large for the one that stays.
        world = msgspec.structs.replace(world, placement="pack")
    jobs = trace if load(name).traits.elastic else trace.rigid()
    nodes = "2x8" if world.failures else "1x8"
    result = run(name, trace, nodes, CHEAP.get(name), world)
    check(jobs, result, 16 if world.failures else 8)
    assert msgspec.structs.asdict(run(name, trace, nodes, CHEAP.get(name), world))["changes"] == result.changes


def test_measurement_errors_come_from_the_seed() -> None:
    trace = trace_of([{"work": 2_000.0, "max_workers": 4}, {"work": 900.0, "max_workers": 8, "submit_s": 50.0}])
    tables = []
    for seed in (1, 1, 2):
        log = watch("afs-l", trace, Settings(curves="learned", observe_sd=0.3, seed=seed))
        tables.append([view.rates.tolist() for view, _ in log])
    assert tables[0] == tables[1]
    assert tables[0] != tables[2]


def test_several_device_types_and_places() -> None:
    rates = np.stack([np.array([[0.0, 1.0, 2.0, 3.0, 4.0]]), np.array([[0.0, 3.0, 6.0, 9.0, 12.0]])])
    trace = trace_of([{"work": 5_000.0, "max_workers": 4, "submit_s": 10.0 * n} for n in range(4)])
    trace = msgspec.structs.replace(trace, pools=("slow", "fast"), rates=rates, curve=np.zeros(4, np.int64))
    _, nodes = cluster.parse("2x4")
    nodes = msgspec.structs.replace(nodes, pool=np.array([0, 1]))
    for name in ("stretto", "sia"):
        result = simulate(trace, ("slow", "fast"), nodes, load(name), Settings(curves="learned", record=True))
        check(trace, result, 8)
    spread = np.repeat(rates[:1, :, :, None], 3, axis=3) * np.array([1.0, 1.0, 0.5])
    placed = msgspec.structs.replace(trace, pools=("gpu",), rates=rates[:1], spread_rates=spread)
    world = Settings(curves="learned", placement="pack", record=True)
    check(placed, run("stretto", placed, "2x4", world=world), 8)


def test_nothing_stands_in_between_unless_asked_for() -> None:
    assert learner(Settings()) is None
    assert learner(Settings(lengths="unknown", estimate_sd=1.0, observe_s=5.0)) is None
    assert learner(Settings(curves="learned")) is not None
    assert learner(Settings(lengths="estimated")) is not None


def test_the_settings_are_reached_by_name(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s,max,speedup\na,0,4,480,4,0.8\nb,60,4,480,4,0.8\n")
    known = runner.run(runner.prepare(path, "csv", "1x4", "afs-l", {}))
    told = {"curves": "learned", "lengths": "estimated", "observe_s": "10"}
    guessed = runner.run(runner.prepare(path, "csv", "1x4", "afs-l", told))
    assert guessed.metrics.avg_jct_s > known.metrics.avg_jct_s
    for key, value in (("curves", "guessed"), ("lengths", "learned"), ("observe_s", "0"), ("observe_sd", "-1")):
        with pytest.raises(UsageError):
            runner.prepare(path, "csv", "1x4", "afs-l", {key: value})
