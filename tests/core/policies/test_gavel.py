"""Gavel's rounds: what they promise is given, nobody is forgotten, and every snapshot is survived."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, nodes_of, snapshots, trace_of, view_of
from stretto.core import invariants
from stretto.core.decision import Decision
from stretto.core.policy import Policy, load
from stretto.core.reasons import Reason, explain
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim import cluster
from stretto.sim.engine import simulate

SETTINGS = [
    {"objective": objective, "perf": perf, "original": original}
    for objective in ("max-min", "makespan", "max-sum-throughput", "fifo")
    for perf in (True, False)
    for original in (True, False)
]


def on_pools(view: Snapshot, gpus: list[int], factors: list[list[float]]) -> Snapshot:
    """The same jobs on several pools; `factors[pool][job]` scales the job's curve there."""
    rates = np.stack([view.rates[0] * np.array(row)[:, None] for row in factors])
    return msgspec.structs.replace(
        view,
        pools=tuple(f"pool-{i}" for i in range(len(gpus))),
        capacity=np.array(gpus) * GPU,
        nodes=nodes_of(gpus, list(range(len(gpus)))),
        rates=rates,
    )


def later(view: Snapshot, decision: Decision, now_s: float) -> Snapshot:
    """The view after the decision held until then, with nothing else changed."""
    pool = np.where(decision.workers > 0, decision.pool, -1)
    return msgspec.structs.replace(view, now_s=now_s, workers=decision.workers, pool=pool)


def without(view: Snapshot, gone: int) -> Snapshot:
    """The same without one job."""
    columns = {
        field: np.delete(column, gone, axis=0)
        for field in view.__struct_fields__
        if isinstance(column := getattr(view, field), np.ndarray) and field not in ("capacity", "rates")
    }
    return msgspec.structs.replace(view, **columns)


def checked(policy: Policy, view: Snapshot, memory: Any) -> Decision:
    decision = policy.decide(view, memory)
    invariants.check(policy, view, decision)
    for code, (first, second) in zip(decision.reason.tolist(), decision.detail.tolist(), strict=True):
        assert explain(code, first, second)
    return decision


# Any snapshot.


@given(view=snapshots(pools=3), settings=st.sampled_from(SETTINGS), wait_s=st.sampled_from([1.0, 359.0, 1e4]))
def test_any_snapshot_gets_a_valid_answer_and_the_same_one_twice(
    view: Snapshot, settings: dict[str, Any], wait_s: float
) -> None:
    policy = load("gavel", settings)
    memory = None
    for _ in range(3):
        decision = checked(policy, view, memory)
        again = policy.decide(view, memory)
        assert np.array_equal(decision.workers, again.workers)
        assert np.array_equal(decision.pool, again.pool)
        assert decision.wake_s == again.wake_s
        memory = decision.memory
        view = later(view, decision, view.now_s + wait_s)


@given(before=snapshots(pools=3), view=snapshots(pools=3), settings=st.sampled_from(SETTINGS))
def test_any_memory_goes_with_any_snapshot(before: Snapshot, view: Snapshot, settings: dict[str, Any]) -> None:
    policy = load("gavel", settings)
    memory = checked(policy, before, None).memory
    checked(policy, msgspec.structs.replace(view, now_s=before.now_s + view.now_s), memory)


@given(view=snapshots(pools=3, overfull=False), settings=st.sampled_from(SETTINGS))
def test_shares_keep_all_limits(view: Snapshot, settings: dict[str, Any]) -> None:
    share = load("gavel", settings).decide(view, None).memory.share
    size = np.clip(view.requested, view.min_workers, view.max_workers)
    need = size * view.width + view.fixed_milli
    assert (share >= 0).all()
    assert (share.sum(axis=1) <= 1 + 1e-7).all()
    assert ((share * need[:, None]).sum(axis=0) <= view.capacity * (1 + 1e-6)).all()
    assert (share[need[:, None] > view.capacity] == 0).all()


def test_unknown_settings_are_named() -> None:
    with pytest.raises(UsageError, match="objective"):
        load("gavel", {"objective": "fairness"})
    with pytest.raises(UsageError, match="round_s"):
        load("gavel", {"round_s": 0})


# The objectives.


def test_max_min_gives_the_same_gpu_time_to_narrow_and_wide_and_more_by_weight() -> None:
    view = view_of(4, [job(size=1), job(size=2), job(size=4), job(size=1, priority=3)] + [job(size=1)] * 8)
    share = load("gavel").decide(view, None).memory.share[:, 0]
    assert share[1] == pytest.approx(share[0] / 2, rel=0.05)
    assert share[2] == pytest.approx(share[0] / 4, rel=0.05)
    assert share[3] == pytest.approx(share[0] * 3, rel=0.05)
    assert share @ view.requested == pytest.approx(4, rel=0.02)


def test_makespan_lets_all_end_together() -> None:
    """400, 200 and 200 steps at 1 step/s on two GPUs: half of the time each, all of it for the long one."""
    view = view_of(2, [job(size=1, remaining=400.0), job(size=1, remaining=200.0), job(size=1, remaining=200.0)])
    share = load("gavel", {"objective": "makespan"}).decide(view, None).memory.share[:, 0]
    assert share == pytest.approx([1.0, 0.5, 0.5], rel=0.02)


def test_the_fast_type_goes_to_whom_it_helps_most_only_with_perf() -> None:
    view = on_pools(view_of(1, [job(size=1), job(size=1)]), [1, 1], [[1.0, 1.0], [0.1, 1.0]])
    aware = load("gavel").decide(view, None)
    assert aware.pool.tolist() == [0, 1]
    assert aware.memory.share[0, 0] > aware.memory.share[1, 0] + 0.2
    blind = load("gavel", {"perf": False}).decide(view, None).memory.share
    assert blind[0] == pytest.approx(blind[1], rel=0.01)


def test_most_throughput_leaves_the_slow_job_out() -> None:
    view = view_of(1, [job(size=1), job(size=1, rate=[0, 9])])
    decision = load("gavel", {"objective": "max-sum-throughput"}).decide(view, None)
    assert decision.memory.share[:, 0] == pytest.approx([0, 1], abs=1e-6)
    assert decision.workers.tolist() == [0, 1]


def test_fifo_stops_at_the_first_that_finds_no_room() -> None:
    view = view_of(4, [job(size=3), job(size=2), job(size=1)])
    decision = load("gavel", {"objective": "fifo"}).decide(view, None)
    assert decision.workers.tolist() == [3, 0, 0]
    assert decision.reason.tolist()[1:] == [Reason.WAITS_FOR_TURN] * 2


# The rounds.


def test_the_longer_it_runs_the_closer_everybody_gets_to_the_promised_share() -> None:
    jobs = [job(size=1, remaining=1e9)] * 12 + [job(size=2, remaining=1e9)] * 4
    view = on_pools(view_of(1, jobs), [3, 4], [[1.0] * 16, np.linspace(0.2, 1, 16).tolist()])
    policy, memory = load("gavel"), None
    errors = []
    for rounds in range(1, 1001):
        decision = checked(policy, view, memory)
        memory = decision.memory
        view = later(view, decision, decision.wake_s)
        if rounds in (10, 100, 1000):
            received = policy.decide(view, memory).memory.received_s / view.now_s
            errors.append(float(np.abs(received - memory.share).max()))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.002


def test_between_rounds_nothing_changes() -> None:
    view = view_of(2, [job(size=2, remaining=1e6), job(size=2, remaining=1e6)])
    policy = load("gavel")
    first = policy.decide(view, None)
    middle = policy.decide(later(view, first, 100.0), first.memory)
    assert np.array_equal(middle.workers, first.workers)
    assert middle.wake_s == first.wake_s == 360.0
    assert sorted(middle.reason.tolist()) == [Reason.WAITS_FOR_ROUND, Reason.CHOSEN_BY_SOLVER]
    second = policy.decide(later(view, middle, 360.0), middle.memory)
    assert np.array_equal(second.workers, first.workers[::-1])


def test_lost_gpus_end_the_round_at_once() -> None:
    view = view_of(4, [job(size=2, remaining=1e6), job(size=2, remaining=1e6)])
    policy = load("gavel")
    first = policy.decide(view, None)
    assert first.workers.tolist() == [2, 2]
    lost = msgspec.structs.replace(later(view, first, 100.0), capacity=np.array([3 * GPU]))
    second = checked(policy, lost, first.memory)
    assert second.workers.sum() == 2
    assert second.wake_s == 460.0


def test_a_gpu_whose_job_ended_is_idle_until_the_round_ends() -> None:
    trace = trace_of([{"work": 100.0}, {"work": 1000.0}, {"work": 100.0}])
    result = simulate(trace, *cluster.uniform(2, 1), load("gavel", {"objective": "fifo", "reset_s": 0}))
    assert result.finish_s.tolist() == [100.0, 1000.0, 460.0]


def test_a_round_ends_when_all_its_jobs_have() -> None:
    trace = trace_of([{"work": 100.0}, {"work": 50.0}])
    result = simulate(trace, *cluster.uniform(1, 1), load("gavel"))
    assert sorted(result.finish_s.tolist()) in ([50.0, 150.0], [100.0, 150.0])


@pytest.mark.parametrize("original", [False, True])
def test_new_jobs_use_idle_gpus_from_the_next_round_on_unless_original(original: bool) -> None:
    """The third arrives just after the second solution, for the second job: the next solution is 1,920 s away."""
    trace = trace_of([{"work": 1e4}, {"work": 1e4, "submit_s": 300.0}, {"work": 100.0, "submit_s": 400.0}])
    result = simulate(trace, *cluster.uniform(3, 1), load("gavel", {"original": original}))
    assert result.start_s.tolist() == [0.0, 360.0, 2520.0 if original else 720.0]


def start_of_a_wide_job_in_a_stream_of_narrow_ones(length: int, original: bool) -> tuple[float, float]:
    """On 4 GPUs, a job of 4; 40 of one GPU are there, and another comes every 200 s. Its start; the last arrival."""
    narrow = [{"work": 800.0, "submit_s": max(0.0, 200.0 * (i - 40))} for i in range(length)]
    trace = trace_of([{"work": 500.0, "requested": 4, "rate": [0, 0, 0, 0, 1], "max_workers": 4}, *narrow])
    result = simulate(trace, *cluster.uniform(4, 1), load("gavel", {"original": original}))
    assert np.isfinite(result.finish_s).all()
    return float(result.start_s[np.argmax(trace.requested)]), float(trace.submit_s.max())


def test_a_wide_job_starts_however_long_the_stream_of_narrow_ones() -> None:
    short, _ = start_of_a_wide_job_in_a_stream_of_narrow_ones(100, original=False)
    long, last = start_of_a_wide_job_in_a_stream_of_narrow_ones(160, original=False)
    assert short == long < last / 2


def test_originally_a_wide_job_waits_for_the_end_of_the_stream() -> None:
    for length in (100, 160):
        start, last = start_of_a_wide_job_in_a_stream_of_narrow_ones(length, original=True)
        assert start > last


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5000), st.integers(0, 4000)), min_size=1, max_size=12),
    settings=st.sampled_from(SETTINGS),
)
def test_every_job_ends_whatever_the_objective(sizes: list[tuple[int, int, int]], settings: dict[str, Any]) -> None:
    jobs = [
        {"requested": n, "max_workers": n, "min_workers": n, "work": float(work), "submit_s": float(at)}
        for n, work, at in sizes
    ]
    result = simulate(trace_of(jobs), *cluster.mixed({"gpu": 4, "other": 4}), load("gavel", settings))
    assert np.isfinite(result.finish_s).all()


def test_jobs_that_come_and_go_keep_their_accounts() -> None:
    view = view_of(1, [job(size=1, remaining=1e6) for _ in range(3)])
    policy = load("gavel")
    first = policy.decide(view, None)
    ran = int(np.argmax(first.workers))
    second = policy.decide(later(view, first, 360.0), first.memory)
    assert second.memory.received_s[:, 0].tolist() == [360.0 if j == ran else 0.0 for j in range(3)]
    gone = int(np.argmax(second.workers))
    third = policy.decide(without(later(view, second, 720.0), gone), second.memory)
    share = second.memory.share[:, 0]
    owed = [720 * share[j] - (360 if j == ran else 0) for j in range(3) if j != gone]
    assert third.memory.deficit_s[:, 0] == pytest.approx(owed)
    assert third.memory.share.sum() == pytest.approx(1, rel=0.01)
    assert third.workers.tolist() == [int(j != ran) for j in range(3) if j != gone]
