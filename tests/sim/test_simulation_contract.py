"""What holds for every policy in simulation: runs add up, end, repeat, and are never better than possible.

An auditor that knows nothing of the simulator works through the recorded changes and has to come to the same
completion times, GPU-seconds and pauses. Then the promises in words: alone on a cluster every job takes its ideal
time; the order of rows in a file means nothing; with `starvation_free` nobody waits for those that come later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import run, watched
from strategies import trace_of, traces
from stretto.core.policies import BUILTIN
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, FloatArray, Nodes
from stretto.sim import bounds, cluster, engine, levels
from stretto.sim.fair import fair_finish
from stretto.sim.trace import LEVELS, RIGID, Load, Trace
from stretto.sim.world import Change, Failure, Result, Settings

CHEAP: dict[str, dict[str, Any]] = {"pollux": {"population": 8, "generations": 5}}
"""Settings without which a policy would take too long here."""
ROUND_S = {"gavel": 360.0, "sia": 60.0, "pollux": 60.0}
"""How long a newcomer may wait for the next round of policies that have rounds."""
CLOSE = 1e-6

every_policy = pytest.mark.parametrize("name", BUILTIN)


def seen(name: str, trace: Trace, pools: tuple[str, ...] = ("gpu",)) -> Trace:
    """The jobs as the policy sees them: rigid unless it is elastic."""
    return engine.seen_by(load(name), trace, pools)


# The auditor.


class Account(msgspec.Struct):
    """One job, as far as the changes tell."""

    left: float
    start_cost_s: float
    resize_cost_s: float
    keeps: str
    """Its level; rigid jobs never save, of others only those of level restart lose work by a stop."""
    every_s: float
    """Seconds of progress between its checkpoints."""
    done: float = 0.0
    undone: float = 0.0
    lost_s: float = 0.0
    lost_to_failures_s: float = 0.0
    workers: int = 0
    since_s: float = 0.0
    ready_s: float = 0.0
    """When the pause of the last start or resize ends."""
    speed: float = 0.0
    start_s: float = math.nan
    gpu_s: float = 0.0
    paused_s: float = 0.0
    preemptions: int = 0
    resizes: int = 0

    def until(self, now_s: float, width: int) -> None:
        """Let time pass on the workers it has."""
        if self.workers:
            self.gpu_s += (now_s - self.since_s) * self.workers * width / GPU
            self.paused_s += min(now_s, self.ready_s) - min(self.since_s, self.ready_s)
            self.done += self.speed * max(0.0, now_s - max(self.ready_s, self.since_s))
        self.since_s = now_s

    def change(self, change: Change, speed: float) -> None:
        """Carry out what was recorded, at its prices."""
        failed, ran_s = change.reason == Reason.NODE_LOST, max(0.0, change.at_s - self.ready_s)
        lost_s = 0.0
        if self.workers and self.keeps == "rigid":
            lost_s = ran_s
        elif self.workers and self.keeps == "restart":
            lost_s = ran_s if math.isinf(self.every_s) else ran_s % self.every_s if self.every_s else 0.0
        elif failed and not change.workers:
            lost_s = min(self.every_s, ran_s)
        self.undone += self.speed * lost_s
        self.lost_to_failures_s += lost_s * failed
        self.lost_s += lost_s * (not failed)
        was, self.workers, self.speed = self.workers, change.workers, speed
        self.preemptions += bool(was and not change.workers)
        self.resizes += bool(was and change.workers)
        if change.workers:
            resized_s = max(self.ready_s, change.at_s + self.resize_cost_s)
            self.ready_s = resized_s if was else change.at_s + self.start_cost_s
            if math.isnan(self.start_s):
                self.start_s = change.at_s


def audit(trace: Trace, nodes: Nodes, result: Result, world: Settings) -> None:
    """Work through the changes: every figure of the result must come out, and capacity must have been enough."""
    accounts = opened(trace, world)
    ends = np.nan_to_num(result.finish_s, nan=math.inf)
    for change in result.changes:
        account = accounts[change.job]
        assert trace.submit_s[change.job] <= change.at_s <= ends[change.job]
        account.until(change.at_s, int(trace.width[change.job]))
        top = trace.rates.shape[2] - 1
        speed = float(trace.rates[change.pool, trace.curve[change.job], min(change.workers, top)])
        account.change(change, speed if change.workers else 0.0)
        low, high = int(trace.min_workers[change.job]), int(trace.max_workers[change.job])
        assert change.workers == 0 or low <= change.workers <= high
    for j, account in enumerate(accounts):
        if not result.rejected[j]:
            account.until(float(result.finish_s[j]), int(trace.width[j]))
            # Work done is work needed and work undone.
            assert account.done == pytest.approx(
                account.left + account.undone, rel=CLOSE, abs=CLOSE * (1 + account.left)
            )
    for column in ("start_s", "gpu_s", "paused_s", "lost_s", "lost_to_failures_s", "preemptions", "resizes"):
        ours = [getattr(account, column) for account in accounts]
        assert getattr(result, column) == pytest.approx(ours, abs=CLOSE, rel=CLOSE, nan_ok=True), column
    check_room(trace, nodes, result, world.failures)


def opened(trace: Trace, world: Settings) -> list[Account]:
    """An account per job, at the prices and with the habits that trace and world say."""

    def column(own: FloatArray | None, default: float) -> list[float]:
        return [default if own is None or math.isnan(own[j]) else float(own[j]) for j in range(len(trace))]

    codes = [-1] * len(trace) if trace.level is None else trace.level.tolist()
    level = [world.level if code < 0 else LEVELS[code] for code in codes]
    start, resize = column(trace.start_s, world.start_s), column(trace.resize_s, world.resize_s)
    every = column(trace.checkpoint_s, world.checkpoint_s)
    return [Account(*columns) for columns in zip(trace.work.tolist(), start, resize, level, every, strict=True)]


def check_room(trace: Trace, nodes: Nodes, result: Result, failures: Iterable[Failure]) -> None:
    """At no time more GPUs were held than were up: of each device type, and on each node where places are known."""
    events: list[tuple[float, int, Any]] = [(f.at_s, 1, f) for f in failures]
    events += [(change.at_s, 2, change) for change in result.changes]
    events += [(float(end), 0, j) for j, end in enumerate(result.finish_s) if not math.isnan(end)]
    up = np.ones(len(nodes.name), np.bool_)
    on_type: dict[int, tuple[int, int]] = {}
    on_nodes: dict[int, Any] = {}
    events.sort(key=lambda event: event[:2])
    for i, (at_s, _, what) in enumerate(events):
        if isinstance(what, Failure):
            up[what.node] = what.up
        else:
            j = what.job if isinstance(what, Change) else what
            on_type.pop(j, None)
            on_nodes.pop(j, None)
            if isinstance(what, Change) and what.workers:
                on_type[j] = what.pool, what.workers * int(trace.width[j])
                on_nodes[j] = np.array(what.nodes, np.int64) * trace.width[j]
                assert not what.nodes or sum(what.nodes) == what.workers
        if i + 1 < len(events) and events[i + 1][0] == at_s:
            continue
        room = np.bincount(nodes.pool, nodes.devices * up * GPU)
        held = np.bincount(*zip(*on_type.values(), strict=True), minlength=len(room)) if on_type else 0 * room
        assert (held <= room).all(), f"at {at_s}"
        places = [place for place in on_nodes.values() if len(place)]
        assert not places or (np.sum(places, axis=0) <= nodes.devices * up * GPU).all(), f"on a node at {at_s}"


def check_limits(trace: Trace, nodes: Nodes, result: Result) -> None:
    """Everybody ended or was turned away, nobody and no average sooner than possible, on no more than there was."""
    ended = ~np.isnan(result.finish_s)
    assert (ended != result.rejected).all()
    assert np.isnan(result.start_s[result.rejected]).all()
    if not ended.any():
        return
    gpus = float(nodes.devices.sum())
    jct = (result.finish_s - trace.submit_s)[ended]
    sizes = bounds.sizes(trace, ended)
    span_s = float(result.finish_s[ended].max() - trace.submit_s[ended].min())
    assert (jct >= sizes.shortest_s - CLOSE).all()
    assert float(jct.mean()) >= bounds.average_jct(sizes, gpus) * (1 - 1e-9) - CLOSE
    assert span_s >= bounds.makespan(sizes, gpus) * (1 - 1e-9) - CLOSE
    assert result.gpu_s.sum() <= gpus * (float(result.finish_s[ended].max()) - trace.submit_s.min()) + CLOSE
    assert (result.gpu_s[ended] >= sizes.area_gpu_s - CLOSE * (1 + sizes.area_gpu_s)).all()


def same(ours: Result, theirs: Result) -> None:
    """Equal to the last digit."""
    for column in ("start_s", "finish_s", "gpu_s", "preemptions", "resizes", "paused_s", "rejected"):
        assert np.array_equal(getattr(ours, column), getattr(theirs, column), equal_nan=column.endswith("_s")), column


costs = st.sampled_from([0.0, 0.5, 30.0])
worlds = st.builds(
    Settings,
    start_s=costs,
    resize_s=costs,
    lengths=st.sampled_from(["known", "unknown"]),
    estimate_sd=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
    slot_s=st.sampled_from([0.0, 0.0, 60.0]),
    gap_s=st.sampled_from([0.0, 0.0, 60.0]),
    record=st.just(True),
)


@every_policy
@settings(max_examples=25)
@given(trace=traces(urgent=True), world=worlds)
def test_a_run_adds_up(name: str, trace: Trace, world: Settings) -> None:
    """With costs, unknown or wrong lengths, and decisions in slots."""
    nodes = cluster.uniform(1, 8)[1]
    result = run(name, trace, "1x8", CHEAP.get(name), world)
    jobs = seen(name, trace)
    check_limits(jobs, nodes, result)
    audit(jobs, nodes, result, world)
    same(result, run(name, trace, "1x8", CHEAP.get(name), world))


@st.composite
def with_stops(draw: st.DrawFn, jobs: st.SearchStrategy[Trace]) -> Trace:
    """The same jobs, some with a level, an interval of checkpoints and costs of their own."""
    trace = draw(jobs)

    def column(values: list[float], kind: Any = np.float64) -> Any:
        drawn = draw(st.lists(st.sampled_from(values), min_size=len(trace), max_size=len(trace)))
        return np.array(drawn, kind) if draw(st.booleans()) else None

    return msgspec.structs.replace(
        trace,
        level=column([-1, 0, 1, 1, 2], np.int64),
        checkpoint_s=column([0.0, 7.0, 40.0, math.inf, math.nan]),
        start_s=column([0.0, 3.0, math.nan]),
        resize_s=column([0.0, 2.0, math.nan]),
        preemptible=column([-1, 0, 1], np.int64),
    )


KEEPING = ("fifo", "srtf", "srjf", "edf", "priority", "elastic-fifo", "elastic-srtf", "afs-l", "ffdl", "optimus")
"""Policies that do not let two jobs take turns, in which those that save nothing would never end."""


@pytest.mark.parametrize("name", KEEPING)
@settings(max_examples=40)
@given(
    trace=with_stops(traces(urgent=True)),
    failures=st.just(()) | st.deferred(lambda: outages()),
    level=st.sampled_from(["", "", "restart", "rigid"]),
    cost_s=costs,
)
def test_lost_work_adds_up(name: str, trace: Trace, failures: tuple[Failure, ...], level: Any, cost_s: float) -> None:
    """With levels, checkpoints and costs per job, and nodes that fail."""
    world = Settings(failures=failures, level=level, start_s=cost_s, resize_s=cost_s, checkpoint_s=20.0, record=True)
    nodes = cluster.uniform(2, 8)[1]
    result = run(name, trace, "2x8", None, world)
    jobs = seen(name, levels.settled(trace, world))
    check_limits(jobs, nodes, result)
    audit(jobs, nodes, result, world)
    for change in result.changes:
        if jobs.level is not None and jobs.level[change.job] == RIGID:
            asked = int(np.clip(trace.requested, trace.min_workers, trace.max_workers)[change.job])
            assert change.workers in (
                (0, asked) if load(name).traits.elastic else (0, int(trace.requested[change.job]))
            )


@st.composite
def outages(draw: st.DrawFn) -> tuple[Failure, ...]:
    """Each of two nodes goes down up to twice, and always comes back."""
    found: list[Failure] = []
    for node in (0, 1):
        moments = sorted(draw(st.lists(st.integers(0, 300), max_size=4, unique=True)))
        if len(moments) % 2:
            moments.append(moments[-1] + 50)
        found += [Failure(float(at), node, up=bool(i % 2)) for i, at in enumerate(moments)]
    return tuple(found)


@every_policy
@settings(max_examples=15)
@given(trace=traces(urgent=True), failures=outages(), placement=st.sampled_from(["", "pack", "spread"]), cost_s=costs)
def test_a_run_with_failures_adds_up(
    name: str, trace: Trace, failures: tuple[Failure, ...], placement: str, cost_s: float
) -> None:
    """Nodes are lost with the workers on them, and come back; workers are on nodes."""
    world = Settings(
        failures=failures, placement=placement, start_s=cost_s, resize_s=cost_s, checkpoint_s=20.0, record=True
    )
    nodes = cluster.uniform(2, 8)[1]
    result = run(name, trace, "2x8", CHEAP.get(name), world)
    jobs = seen(name, trace)
    check_limits(jobs, nodes, result)
    if failures or placement:
        audit(jobs, nodes, result, world)


@every_policy
@settings(max_examples=10)
@given(
    trace=traces(max_jobs=6), slower=st.sampled_from([0.25, 1.0, 3.0]), replicas=st.lists(st.integers(0, 5), max_size=4)
)
def test_a_run_with_device_types_and_a_service_adds_up(
    name: str, trace: Trace, slower: float, replicas: list[int]
) -> None:
    """Jobs run on one of two device types; a service takes what its load asks for, first."""
    pools, nodes = cluster.mixed({"fast": 8, "slow": 8}, gpus=8)
    load_curve = Load(np.arange(len(replicas)) * 50.0, np.array(replicas, np.int64))
    jobs = with_service(on_types(trace, slower), load_curve if replicas else None)
    world = Settings(record=True, start_s=0.5, resize_s=0.5)
    result = engine.simulate(jobs, pools, nodes, load(name, CHEAP.get(name)), world)
    training = ~result.is_service
    assert (np.isnan(result.finish_s) == result.rejected).all()
    shortest = bounds.sizes(seen(name, jobs, pools)).shortest_s
    assert ((result.finish_s - jobs.submit_s)[training] >= shortest - CLOSE).all()
    check_room(jobs, nodes, result, ())


def on_types(trace: Trace, slower: float) -> Trace:
    rates = np.concatenate((trace.rates, trace.rates * slower))
    return msgspec.structs.replace(trace, pools=("fast", "slow"), rates=rates)


def with_service(trace: Trace, load_curve: Load | None) -> Trace:
    """One more job, the last, that serves for 200 s."""
    if load_curve is None:
        return trace
    columns = {
        column: np.append(getattr(trace, column), value)
        for column, value in (
            ("submit_s", float(trace.submit_s.max()) + 1), ("requested", 1), ("min_workers", 1), ("max_workers", 4),
            ("work", 0.0), ("curve", 0), ("duration_s", 200.0), ("deadline_s", math.inf), ("priority", 5),
            ("klass", 0), ("width", GPU),
        )
    }  # fmt: skip
    return msgspec.structs.replace(
        trace,
        ids=(*trace.ids, "service"),
        demand=np.zeros((len(trace) + 1, 3), np.int64),
        services=(*[None] * len(trace), load_curve),
        **columns,
    )


# Ideal times.


def ideal_s(name: str, trace: Trace) -> FloatArray:
    """What each job takes alone on a cluster that has room for its maximum."""
    jobs = seen(name, trace)
    if name == "srjf":  # by definition never more than the minimum
        jobs = msgspec.structs.replace(jobs, max_workers=jobs.min_workers)
    return bounds.sizes(jobs).shortest_s


def limited(trace: Trace, gpus: int) -> Trace:
    """The same jobs, none with a maximum that does not fit so many GPUs."""
    high = np.maximum(trace.min_workers, np.minimum(trace.max_workers, gpus * GPU // trace.width))
    return msgspec.structs.replace(trace, max_workers=high)


@pytest.mark.parametrize("lengths", ["known", "unknown"])
@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "pollux"])
@settings(max_examples=15)
@given(trace=traces(max_jobs=5), start_s=costs)
def test_alone_every_job_takes_its_ideal_time(name: str, lengths: Any, trace: Trace, start_s: float) -> None:
    """One job after the other on 4x8: a start and the ideal time; where there are rounds, up to one more of them."""
    trace = limited(trace, 32)
    far = msgspec.structs.replace(trace, submit_s=np.arange(len(trace)) * 10_000.0)
    result = run(name, far, "4x8", world=Settings(start_s=start_s, lengths=lengths))
    late_s = (result.finish_s - far.submit_s) - start_s - ideal_s(name, far)
    assert (late_s >= -CLOSE).all()
    assert (late_s <= ROUND_S.get(name, 0.0) + CLOSE).all()
    assert not result.preemptions.any()
    if name not in ROUND_S:
        assert not result.resizes.any()
        assert result.paused_s == pytest.approx(start_s)


@pytest.mark.parametrize("name", [name for name in BUILTIN if name != "pollux"])
@settings(max_examples=10)
@given(trace=traces(max_jobs=5))
def test_with_room_for_all_every_job_takes_its_ideal_time(name: str, trace: Trace) -> None:
    """All at once, on a cluster that has room for everybody's maximum."""
    gpus = int(-(-(np.maximum(trace.max_workers, trace.requested) * trace.width).sum() // GPU))
    nodes = f"{-(-gpus // 8) + 1}x8"
    result = run(name, trace, nodes)
    late_s = result.finish_s - trace.submit_s - ideal_s(name, trace)
    assert (late_s >= -CLOSE).all()
    assert (late_s <= ROUND_S.get(name, 0.0) + CLOSE).all()


def test_pollux_doubles() -> None:
    """Why it is left out: a job starts on its minimum and may at most double every round."""
    trace = trace_of([{"work": 8 * 600.0, "max_workers": 8}])
    result = run("pollux", trace, "1x8", {"round_s": 60})
    assert result.finish_s[0] == pytest.approx(60 + 60 + 60 + (4800 - 60 * 7) / 8)


# Order of rows.


def shuffled(trace: Trace, order: Sequence[int], curves: Sequence[int]) -> Trace:
    """The same jobs, read from a file with its rows, and a table with its curves, in another order."""
    rows = np.array(order)
    where = np.argsort(curves)
    return Trace.build(
        trace.name,
        [trace.ids[i] for i in order],
        trace.submit_s[rows].tolist(),
        trace.requested[rows].tolist(),
        trace.duration_s[rows].tolist(),
        work=trace.work[rows].tolist(),
        curve=where[trace.curve[rows]].tolist(),
        rates=trace.rates[:, list(curves)],
        min_workers=trace.min_workers[rows].tolist(),
        max_workers=trace.max_workers[rows].tolist(),
        width_milli=trace.width[rows].tolist(),
        classes=[trace.classes[k] for k in trace.klass[rows].tolist()],
        deadline_s=trace.deadline_s[rows].tolist(),
        priority=trace.priority[rows].tolist(),
        origin_s=0.0,
    )


@every_policy
@settings(max_examples=10)
@given(trace=traces(urgent=True), data=st.data())
def test_the_order_of_rows_means_nothing(name: str, trace: Trace, data: st.DataObject) -> None:
    """Rows are shuffled with their ids; every id fares the same."""
    order = data.draw(st.permutations(range(len(trace))))
    curves = data.draw(st.permutations(range(trace.rates.shape[1])))
    other = shuffled(trace, order, curves)
    assert other.ids == trace.ids
    same(run(name, trace, "1x8", CHEAP.get(name)), run(name, other, "1x8", CHEAP.get(name)))


# Nobody starves.


def stream(count: int, every_s: float, wide_s: float) -> Trace:
    """A job that needs the whole cluster, just after the first of a stream of short ones that keep it full."""
    short = {"requested": 1, "max_workers": 1, "work": 90.0}
    jobs: list[dict[str, Any]] = [{**short, "submit_s": i * every_s} for i in range(count)]
    jobs.append({"requested": 8, "min_workers": 8, "max_workers": 8, "work": 8 * wide_s, "submit_s": 1.0})
    return trace_of(jobs)


def wide_start_s(name: str, count: int, lengths: Any = "known", **world: Any) -> float:
    """When the wide job starts beside a stream of so many; the stream alone asks for nine of the eight GPUs."""
    trace = stream(count, every_s=10.0, wide_s=30.0)
    result = run(name, trace, "1x8", CHEAP.get(name), Settings(lengths=lengths, **world))
    return float(result.start_s[trace.requested == 8][0])


@pytest.mark.parametrize("lengths", ["known", "unknown"])
@pytest.mark.parametrize("name", [name for name in BUILTIN if load(name).traits.starvation_free])
def test_starvation_free(name: str, lengths: Any) -> None:
    """The wide job starts before the stream ends, and no matter how long the stream goes on."""
    start_s = wide_start_s(name, 200, lengths)
    assert start_s < 200 * 10.0
    assert wide_start_s(name, 400, lengths) == start_s


@pytest.mark.parametrize("name", [name for name in BUILTIN if load(name).traits.starvation_free])
def test_starvation_free_in_spite_of_costs_and_wrong_lengths(name: str) -> None:
    for seed in range(3):
        world = {"start_s": 2.0, "resize_s": 2.0, "estimate_sd": 0.5, "seed": seed}
        assert wide_start_s(name, 300, **world) < 300 * 10.0


def test_stretto_waits_in_proportion_to_a_fair_share() -> None:
    """Its bound is the fair world, where a long wide job gets little while others keep coming: it starts in time
    to end within 1.3 times as long, if it were not stopped again."""
    starts_s = []
    for count in (1000, 1300):
        trace = stream(count, every_s=12.5, wide_s=1000.0)
        wide = trace.requested == 8
        fair_s = float((fair_finish(trace, 8 * GPU) - trace.submit_s)[wide][0])
        starts_s.append(float(run("stretto", trace, "1x8").start_s[wide][0]))
        assert starts_s[-1] <= 1.3 * fair_s - 1000.0 + 120.0
    assert starts_s[0] == starts_s[1] < 1000 * 12.5


@pytest.mark.parametrize("name", ["fit-first", "gang", "sjf", "fulfilment"])
def test_others_starve(name: str) -> None:
    """The stream is what it should be: under policies that do not promise it, the wide job waits for its end."""
    assert wide_start_s(name, 200) > 200 * 10.0
    assert wide_start_s(name, 400) > 400 * 10.0


# Reasons for those turned away.


@pytest.mark.parametrize(("name", "options"), [("elasticflow", {}), ("edf", {"admission": True})])
def test_who_is_turned_away_is_told_why(name: str, options: dict[str, Any]) -> None:
    trace = msgspec.structs.replace(
        trace_of([{"work": 800.0, "requested": 8, "max_workers": 8}] * 2), deadline_s=np.array([150.0, 150.0])
    )
    log: list[Any] = []
    pools, nodes = cluster.parse("1x8")
    result = engine.simulate(trace, pools, nodes, watched(name, log, **options))
    assert result.rejected.tolist() == [False, True]
    assert result.finish_s[0] <= 150.0
    told = [int(decision.reason[j]) for _, decision in log for j in np.flatnonzero(decision.rejected).tolist()]
    assert told == [Reason.REJECTED_DEADLINE]
