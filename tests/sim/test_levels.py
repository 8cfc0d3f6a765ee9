"""What stops cost each job: by hand, and where the columns of a trace say what the world's settings say."""

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
from strategies import trace_of, traces
from stretto.core import cycle
from stretto.core.policies import BUILTIN
from stretto.errors import PolicyError, UsageError
from stretto.sim import cluster, levels, readers, runner
from stretto.sim.engine import simulate
from stretto.sim.forecast import forecast
from stretto.sim.readers import plain
from stretto.sim.trace import ELASTIC, RESTART, RIGID, UNSAID, Trace
from stretto.sim.world import Failure, Result, Settings

CHEAP: dict[str, dict[str, Any]] = {"pollux": {"population": 8, "generations": 5}}


def two(**columns: Any) -> Trace:
    """A long job, and a short one that is ahead of it under srtf and takes both GPUs from 50 s to 60 s."""
    jobs = [{"work": 200.0, "requested": 2}, {"work": 20.0, "requested": 2, "submit_s": 50.0}]
    return msgspec.structs.replace(trace_of(jobs).rigid(), **columns)


def ends(trace: Trace, policy: str = "srtf", **world: Any) -> Result:
    """With stops as policies were published: they take whatever they want."""
    return run(policy, trace, "1x2", world=msgspec.convert({"stops_lose_work": True, **world}, Settings))


# What is undone.


def test_without_a_level_a_stop_loses_nothing() -> None:
    result = ends(two())
    assert result.finish_s.tolist() == [110, 60]
    assert not result.lost_s.any()


def test_a_rigid_job_begins_again_from_nothing() -> None:
    result = ends(two(level=np.array([RIGID, UNSAID])))
    assert result.finish_s.tolist() == [160, 60]
    assert result.lost_s.tolist() == [50, 0]


def test_for_an_equal_it_is_not_stopped_unless_the_world_says_so() -> None:
    """It would lose 50 s, and a start costs nothing: the short one waits for its end."""
    result = ends(two(level=np.array([RIGID, UNSAID])), stops_lose_work=False)
    assert result.finish_s.tolist() == [100, 110]
    assert not result.lost_s.any()


@pytest.mark.parametrize("start_s", [16.0, 17.0])
def test_work_of_two_starts_is_weighed_like_a_start(start_s: float) -> None:
    """At 50 s it has done 50 s less the start's."""
    lost_s = 50 - start_s
    result = ends(two(level=np.array([RIGID, UNSAID]), start_s=np.array([start_s, 0.0])), stops_lose_work=False)
    assert result.lost_s.tolist() == [lost_s if lost_s <= 2 * start_s else 0, 0]
    assert result.preemptions.tolist() == [int(lost_s <= 2 * start_s), 0]


@pytest.mark.parametrize(("every_s", "lost_s"), [(0.0, 0.0), (20.0, 10.0), (50.0, 0.0), (60.0, 50.0), (math.inf, 50.0)])
def test_a_restarted_job_goes_on_from_its_last_checkpoint(every_s: float, lost_s: float) -> None:
    own = ends(two(level=np.array([RESTART, ELASTIC]), checkpoint_s=np.array([every_s, math.nan])))
    assert own.lost_s.tolist() == [lost_s, 0]
    assert own.finish_s[0] == 110 + lost_s
    same = ends(two(), level="restart", checkpoint_s=every_s)
    assert same.finish_s.tolist() == own.finish_s.tolist(), "the world may say it for all"


def test_the_pause_of_a_start_is_no_progress() -> None:
    result = ends(two(level=np.array([RESTART, UNSAID]), start_s=np.array([15.0, 0.0])), checkpoint_s=20.0)
    assert result.lost_s.tolist() == [15, 0]
    assert result.paused_s.tolist() == [30, 0]
    assert result.finish_s[0] == 60 + 15 + 80


def test_a_resize_by_restart_loses_what_was_not_saved() -> None:
    """Both share two GPUs from 50 s on: the first goes on from 40 s, on one worker, and alone again from there."""
    jobs = [{"work": 200.0, "max_workers": 2}, {"work": 20.0, "requested": 1, "max_workers": 1, "submit_s": 50.0}]
    trace = msgspec.structs.replace(trace_of(jobs), level=np.array([RESTART, UNSAID]))
    result = ends(trace, "elastic-fifo", checkpoint_s=20.0)
    assert result.resizes[0] == 2
    assert result.lost_s[0] == 10.0, "20 s on one worker were saved when it grew again"
    assert result.finish_s[0] == pytest.approx(70 + (200 - 80 - 20) / 2)
    elastic = ends(msgspec.structs.replace(trace, level=np.array([ELASTIC, UNSAID])), "elastic-fifo", checkpoint_s=20.0)
    assert not elastic.lost_s.any()


def test_a_rigid_job_has_the_size_it_asked_for_under_every_policy() -> None:
    trace = trace_of([{"work": 100.0, "requested": 2, "max_workers": 4}])
    free = run("elastic-fifo", trace, "1x4")
    fixed = run("elastic-fifo", trace, "1x4", world=Settings(level="rigid"))
    assert (free.finish_s[0], fixed.finish_s[0]) == (25, 50)


def test_work_of_earlier_phases_is_undone_too() -> None:
    """Stopped at 50 s, of which 20 s were its second phase at twice the speed: both are done again."""
    trace = two(level=np.array([RIGID, UNSAID]))
    rates = np.concatenate((trace.rates, 2 * trace.rates), axis=1)
    phases = ((np.array([30.0, 140.0]), np.array([0, 1])), (np.array([10.0]), np.array([0])))
    trace = msgspec.structs.replace(trace, phases=phases, rates=rates, work=np.array([170.0, 10.0]))
    result = ends(trace)
    assert result.lost_s.tolist() == [50, 0]
    assert result.finish_s[0] == 60 + 30 + 70
    saved = ends(msgspec.structs.replace(trace, level=np.array([RESTART, UNSAID])), checkpoint_s=25.0)
    assert saved.lost_s.tolist() == [0, 0], "saved at 25 s and at 50 s"
    later = ends(msgspec.structs.replace(trace, level=np.array([RESTART, UNSAID])), checkpoint_s=28.0)
    assert later.lost_s.tolist() == [22, 0]
    assert later.finish_s[0] == 60 + 2 + 70, "2 s of the first phase and all of the second"


def test_what_a_lost_node_undoes_is_counted_apart() -> None:
    trace = trace_of([{"work": 100.0, "requested": 1}]).rigid()
    world = {"failures": (Failure(30.0, 0), Failure(40.0, 0, True))}
    for level, lost_s in (("", 25.0), ("elastic", 25.0), ("restart", 5.0), ("rigid", 30.0)):
        result = ends(trace, "fifo", level=level, checkpoint_s=25.0, **world)
        assert (result.lost_s[0], result.lost_to_failures_s[0]) == (0, lost_s), level
        assert result.finish_s[0] == 110 + lost_s


def test_a_run_in_which_a_job_never_ends_is_an_error() -> None:
    trace = trace_of([{"work": 300.0, "requested": 2}, {"work": 300.0, "requested": 2}]).rigid()
    with pytest.raises(PolicyError, match="never end"):
        run("round-robin", trace, "1x2", {"quantum_s": 10.0}, Settings(level="rigid", stops_lose_work=True))
    kept = run("round-robin", trace, "1x2", {"quantum_s": 10.0}, Settings(level="rigid"))
    assert kept.finish_s.tolist() == [150, 300], "as they are, they run one after the other"


# What policies are told.


def test_the_snapshot_says_what_a_stop_would_lose() -> None:
    log: list[Any] = []
    trace = two(level=np.array([RESTART, RIGID]), checkpoint_s=np.array([20.0, 0.0]))
    simulate(trace, *cluster.parse("1x2"), watched("fifo", log))
    views = {view.now_s: view for view, _ in log}
    assert views[50.0].lost_s.tolist() == [10, 0]
    assert views[50.0].fragile.tolist() == [True, True]
    assert views[50.0].preemptible.tolist() == [True, False]
    assert views[0.0].lost_s.tolist() == [0]


def test_where_nobody_loses_anything_it_says_nothing() -> None:
    for trace, world in ((two(), Settings()), (two(), Settings(level="elastic")), (two(), Settings(level="restart"))):
        log: list[Any] = []
        simulate(trace, *cluster.parse("1x2"), watched("fifo", log), world)
        assert all(view.lost_s is None and view.fragile is None and view.preemptible is None for view, _ in log)


def test_who_may_be_stopped_for_urgent_work() -> None:
    trace = two(level=np.array([RIGID, ELASTIC]), preemptible=np.array([1, 0]))
    found = levels.stakes(trace, Settings())
    assert found is not None
    assert found.preemptible.tolist() == [True, False]
    for setting, told in ((None, [False, True]), (True, [True, True]), (False, [False, False])):
        found = levels.stakes(two(level=np.array([RIGID, ELASTIC])), Settings(preemptible=setting))
        assert found is not None
        assert found.preemptible.tolist() == told


@pytest.mark.parametrize(("stops_lose_work", "ends_s"), [(True, [61 + 104, 61]), (False, [104, 115])])
def test_a_forecast_knows_what_is_at_stake(stops_lose_work: bool, ends_s: list[float]) -> None:
    """Seen at 50 s, when the long job would lose 46 s: it begins again after the short one, or that one waits."""
    log: list[Any] = []
    trace = two(level=np.array([RIGID, UNSAID]), start_s=np.array([4.0, 1.0]))
    policy = watched("srtf", log)
    result = simulate(trace, *cluster.parse("1x2"), policy, Settings(stops_lose_work=stops_lose_work))
    assert result.finish_s.tolist() == ends_s
    # Where stops may lose work, policies are not told what.
    told = msgspec.structs.replace(
        next(view for view, _ in log if view.now_s == 50.0),
        lost_s=np.array([46.0, 0.0]),
    )
    rules = cycle.Settings(stops_lose_work=stops_lose_work)
    assert forecast(told, policy, rules=rules).end_s.tolist() == (result.finish_s - 50.0).tolist()


# The same world, said in two ways.


@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=10)
@given(trace=traces(urgent=True), start_s=st.sampled_from([0.0, 5.0]), resize_s=st.sampled_from([0.0, 0.5]))
def test_columns_that_say_what_the_world_says_change_nothing(
    name: str, trace: Trace, start_s: float, resize_s: float
) -> None:
    n = len(trace)
    said = msgspec.structs.replace(
        trace,
        start_s=np.full(n, start_s),
        resize_s=np.full(n, resize_s),
        level=np.zeros(n, np.int64),
        checkpoint_s=np.full(n, 30.0),
        preemptible=np.ones(n, np.int64),
    )
    world = Settings(start_s=start_s, resize_s=resize_s, record=True)
    ours = run(name, trace, "1x8", CHEAP.get(name), world)
    theirs = run(name, said, "1x8", CHEAP.get(name), Settings(record=True))
    assert ours.changes == theirs.changes
    for column in ("start_s", "finish_s", "gpu_s", "paused_s", "lost_s", "preemptions", "resizes"):
        np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column), column)


# Files and settings.

TEXT = """job_id,submit_s,gpus,duration_s,level,start_s,resize_s,checkpoint_s,preemptible
a,0,2,100,restart,5,,600,
b,0,2,100,rigid,,2.5,,yes
c,0,2,100,,,,never,false
"""


def test_the_plain_format_says_it(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(TEXT)
    trace = readers.read(path, "csv")
    assert trace.level is not None
    assert trace.level.tolist() == [RESTART, RIGID, UNSAID]
    np.testing.assert_array_equal(trace.start_s, [5, math.nan, math.nan])
    np.testing.assert_array_equal(trace.resize_s, [math.nan, 2.5, math.nan])
    np.testing.assert_array_equal(trace.checkpoint_s, [600, math.nan, math.inf])
    np.testing.assert_array_equal(trace.preemptible, [-1, 1, 0])
    with (tmp_path / "again.csv").open("w") as file:
        plain.write(plain.rows_of(trace), file)
    again = readers.read(tmp_path / "again.csv", "csv")
    for column in ("level", "start_s", "resize_s", "checkpoint_s", "preemptible"):
        np.testing.assert_array_equal(getattr(again, column), getattr(trace, column), column)


def test_any_trace_can_be_given_a_level(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s\na,0,2,100\nb,50,2,10\n")
    world = {"level": "restart", "checkpoint_s": "20", "stops_lose_work": "true"}
    found = runner.run(runner.prepare(path, "csv", "1x2", "srtf", world))
    assert found.metrics.lost_s == 10
    assert found.metrics.plain()["lost_s"] == 10
    never = runner.run(runner.prepare(path, "csv", "1x2", "srtf", {**world, "checkpoint_s": "never"}))
    assert never.metrics.lost_s == 50
    assert never.result.lost_s.tolist() == [50, 0]
    for key, value in (("level", "steel"), ("checkpoint_s", "-1"), ("preemptible", "maybe"), ("start_s", "inf")):
        with pytest.raises(UsageError):
            runner.prepare(path, "csv", "1x2", "srtf", {key: value})


def test_bounds_and_fairness_know_the_size_of_rigid_jobs(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text("job_id,submit_s,gpus,duration_s,min,max,speedup\na,0,2,100,1,4,linear\n")
    free = runner.run(runner.prepare(path, "csv", "1x4", "elastic-fifo", {})).metrics
    fixed = runner.run(runner.prepare(path, "csv", "1x4", "elastic-fifo", {"level": "rigid"})).metrics
    assert (free.lower_bound_avg_jct_s, free.worst_ftf) == (50, 1)
    assert (fixed.lower_bound_avg_jct_s, fixed.worst_ftf) == (100, 1)
