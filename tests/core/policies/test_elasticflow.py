"""A promised deadline is kept, a deadline that cannot be kept is not promised, and free GPUs are put to use."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_checks import answer
from strategies import job, snapshots, traces, view_of
from stretto.core.policies.elasticflow import Book
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings

POWERS = [0.0, 1.0, 2.0, 2.0, 4.0]
"""Linear on 1, 2 and 4 workers."""


def deciding(view: Snapshot, memory: Any = None, **options: Any) -> Any:
    return answer("elasticflow", view, memory, **options)


def reasons(decision: Any) -> list[Reason]:
    return [Reason(code) for code in decision.reason.tolist()]


def wants(work: float, due_s: float, **more: Any) -> dict[str, Any]:
    return job(max_workers=4, rate=POWERS, remaining=work, deadline_s=due_s, **more)


def test_shares_first_then_growth_of_whoever_has_nothing() -> None:
    view = view_of(4, [wants(200, 110), wants(100, 120), wants(10, math.inf)])
    decision = deciding(view)
    # Job 0 needs 2 GPUs, job 1 one; the fourth goes to the job without a deadline.
    assert decision.workers.tolist() == [2, 1, 1]
    assert reasons(decision) == [Reason.ADMITTED_SHARE, Reason.ADMITTED_SHARE, Reason.RUNS]
    assert decision.memory.promised == {0, 1}


def test_a_deadline_that_cannot_be_kept_is_refused_and_others_stay() -> None:
    view = view_of(4, [wants(300, 100), wants(300, 100), wants(90, 100)])
    # Job 0 takes all GPUs for 75 s; in what is left before 100 s, job 2 can be done but not job 1.
    decision = deciding(view, gap_s=1.0)
    assert decision.rejected.tolist() == [False, True, False]
    assert reasons(decision)[1] == Reason.REJECTED_DEADLINE
    assert decision.detail[1, 0] == 100
    kept = deciding(view, gap_s=1.0, reject=False)
    assert not kept.rejected.any()
    assert kept.memory.refused == {1}


def test_a_refused_job_runs_on_what_is_left_and_stays_refused() -> None:
    late = wants(1000, 10)
    first = deciding(view_of(4, [late]), reject=False)
    assert first.workers.tolist() == [4]
    again = deciding(view_of(4, [late, wants(390, 110)], now_s=10.0), first.memory, reject=False)
    assert again.workers.tolist() == [0, 4]
    assert again.memory.refused == {0}
    assert reasons(again)[0] == Reason.NO_ROOM


def test_newcomers_of_one_decision_stand_alone_or_together() -> None:
    view = view_of(4, [wants(100, 100), wants(1000, 100)])
    assert deciding(view).rejected.tolist() == [False, True]
    assert deciding(view, original=True).rejected.tolist() == [True, True]


def test_in_the_original_a_late_job_keeps_everybody_out() -> None:
    late = wants(1000, 10, workers=1)
    view = view_of(4, [late, wants(10, 1000)])
    assert deciding(view, original=True).rejected.tolist() == [False, True]
    assert deciding(view).rejected.tolist() == [False, False]


def test_growth_goes_by_extra_gpu_time() -> None:
    """Nobody is in a hurry; one more GPU costs job 0 nothing, job 1 (which hardly scales) much."""
    poor = [0.0, 1.0, 1.1, 1.1, 1.2]
    jobs = [wants(1000, 1e6), job(max_workers=4, rate=poor, remaining=1000, deadline_s=1e6)]
    assert deciding(view_of(3, jobs), sign="code").workers.tolist() == [1, 2]
    assert deciding(view_of(3, jobs), sign="paper").workers.tolist() == [2, 1]
    boundless = [{**j, "deadline_s": math.inf} for j in jobs]
    assert deciding(view_of(3, boundless), sign="code").workers.tolist() == [1, 2]
    assert deciding(view_of(3, boundless), sign="paper").workers.tolist() == [2, 1]


def test_unknown_lengths_get_what_nobody_needs() -> None:
    view = view_of(4, [wants(math.nan, 100), wants(380, 100)])
    decision = deciding(view)
    assert decision.workers.tolist() == [0, 4]
    assert not decision.rejected.any()
    alone = deciding(view_of(4, [wants(math.nan, 100)]))
    assert alone.workers.tolist() == [4]


def test_a_running_job_is_not_rejected_when_memory_is_lost() -> None:
    decision = deciding(view_of(4, [wants(1e6, 100, workers=2)]))
    assert not decision.rejected.any()
    assert decision.workers.tolist() == [4]


def test_a_promise_outlives_a_time_without_gpus() -> None:
    made = deciding(view_of(4, [wants(100, 1000)]))
    none_left = deciding(view_of([0], [wants(100, 1000)], now_s=1.0), made.memory)
    assert not none_left.rejected.any()
    assert none_left.workers.tolist() == [0]
    back = deciding(view_of(4, [wants(100, 1000)], now_s=2.0), none_left.memory)
    assert not back.rejected.any()
    assert back.workers.tolist() == [4]


def test_alone_a_job_runs_at_its_fastest_size() -> None:
    rates = np.array([[[0.0, 5.0, 9.0, 9.5, 14.0, 13.0, 12.0, 11.0, 10.0]]])
    trace = Trace.build("one", ["a"], [0.0], [1], [200.0], work=[1000.0], curve=[0], rates=rates,
                        min_workers=[1], max_workers=[8], deadline_s=[1e5])  # fmt: skip
    assert simulated(trace, 8).finish_s.tolist() == [pytest.approx(1000 / 14)]


def simulated(trace: Trace, gpus: int, settings: Settings | None = None, **options: Any) -> Result:
    return simulate(trace, *cluster.uniform(1, gpus), load("elasticflow", options), settings)


def with_deadlines(trace: Trace, factors: list[float]) -> Trace:
    slack = np.resize(np.array(factors), len(trace))
    return msgspec.structs.replace(trace, deadline_s=trace.submit_s + trace.duration_s * slack)


@given(
    traces(gpus=8),
    st.lists(st.sampled_from([0.2, 0.7, 1.0, 1.5, 3.0, 10.0, math.inf]), min_size=1, max_size=10),
    st.sampled_from([0.0, 1.0, 60.0]),
    st.sampled_from(["code", "paper"]),
)
def test_no_admitted_deadline_is_missed(trace: Trace, factors: list[float], gap_s: float, sign: str) -> None:
    trace = with_deadlines(trace, factors)
    result = simulated(trace, 8, gap_s=gap_s, sign=sign)
    admitted = ~result.rejected
    assert (result.finish_s[admitted] <= trace.deadline_s[admitted]).all()


def test_the_last_plan_is_kept_where_a_new_one_would_break_a_promise() -> None:
    """Job 0 grows after job 1; when job 2 comes, planning afresh would move job 1 to where job 0 must run."""
    rates = np.array(
        [[[0.0, 1.0, 1.2, 1.4, 1.5], [0.0, 7.3, 13.6, 19.6, 25.4], [0.0, 7.0, 11.0, 14.0, 17.0]]],
    )
    trace = Trace.build(
        "three", ["0", "1", "2"], [0.0, 0.0, 300.0], [3, 2, 1], [1.0] * 3, work=[1400.0, 13600.0, 7300.0],
        curve=[0, 1, 2], rates=rates, min_workers=[3, 2, 1], max_workers=[4, 4, 4],
        deadline_s=[1500.0, 1000.0, 1300.0],
    )  # fmt: skip
    result = simulated(trace, 4)
    kept = result.finish_s <= trace.deadline_s
    assert (kept | result.rejected).all()
    assert kept.sum() >= 2


def test_costs_make_jobs_late_but_never_stuck() -> None:
    rates = np.array([[POWERS]])
    trace = Trace.build(
        "tight", ["0", "1", "2"], [0.0, 5.0, 10.0], [1, 1, 1], [100.0] * 3, work=[100.0] * 3, curve=[0] * 3,
        rates=rates, min_workers=[1] * 3, max_workers=[4] * 3, deadline_s=[101.0, 106.0, 111.0],
    )  # fmt: skip
    result = simulated(trace, 4, Settings(start_s=30.0, resize_s=30.0))
    assert np.isfinite(result.finish_s[~result.rejected]).all()
    assert (result.finish_s > trace.deadline_s).any()


@given(snapshots(), st.booleans(), st.booleans(), st.sampled_from(["code", "paper"]))
def test_any_snapshot_is_answered_twice_alike(view: Snapshot, original: bool, reject: bool, sign: str) -> None:
    options = {"original": original, "reject": reject, "sign": sign}
    first = deciding(view, **options)
    frozen = msgspec.msgpack.encode(first.memory)
    second = deciding(view, first.memory, **options)
    third = deciding(view, msgspec.msgpack.decode(frozen, type=Book), **options)
    assert second.workers.tolist() == third.workers.tolist()
    assert msgspec.msgpack.encode(first.memory) == frozen
    running = view.workers > 0
    assert not (first.rejected & running).any()
    assert not (first.rejected & np.isinf(view.deadline_s)).any()


@given(snapshots(known=True))
def test_free_gpus_are_used_up_to_each_jobs_best_level(view: Snapshot) -> None:
    """Nobody who stays waits while its smallest size fits."""
    decision = deciding(view)
    free = view.total_milli - int(((decision.workers * view.width + view.fixed_milli) * (decision.workers > 0)).sum())
    need = view.min_workers * view.width + view.fixed_milli
    waits = (decision.workers == 0) & ~decision.rejected
    slow = view.rate(view.min_workers) == 0
    assert not (waits & ~slow & (need <= free)).any()
