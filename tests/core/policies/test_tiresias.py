"""Queues by attained service: who goes down, who comes back, and when to look again."""

from __future__ import annotations

import math

import pytest

from policy_checks import answer, run, why, workers_of
from strategies import job, trace_of, view_of
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.errors import UsageError


def test_less_attained_service_goes_first() -> None:
    view = view_of(2, [job(size=2, gpu_s=5000.0, ran_s=2500.0), job(size=2)])
    decision = answer("tiresias", view)
    assert decision.workers.tolist() == [0, 2]
    assert why(decision, 0) is Reason.LOWER_QUEUE
    assert decision.detail[0].tolist() == [1.0, 0.0]
    assert decision.wake_s == 1800.0  # 3,600 GPU-seconds on two GPUs.


def test_a_running_job_is_not_displaced_within_its_queue() -> None:
    first = answer("tiresias", view_of(2, [job(size=2), job(size=1)]))
    assert first.workers.tolist() == [2, 0]
    # The first was stopped from outside and the second runs: now the second stands before it.
    later = view_of(2, [job(size=2, ran_s=10.0, gpu_s=20.0), job(size=1, workers=1, ran_s=1.0, gpu_s=1.0)], now_s=11.0)
    assert answer("tiresias", later, first.memory).workers.tolist() == [0, 1]


def test_width_counts_unless_told_otherwise() -> None:
    view = view_of(8, [job(size=8, workers=8, ran_s=450.0, gpu_s=3600.0)], now_s=450.0)
    assert answer("tiresias", view).memory.level.tolist() == [1]
    by_time = answer("tiresias", view, service="time")
    assert by_time.memory.level.tolist() == [0]
    assert by_time.wake_s == 3600.0


def test_the_original_looks_too_late_at_wide_jobs() -> None:
    """(3250 - seconds run) / GPUs ahead, instead of when GPUs x time reach 3250."""
    view = view_of(8, [job(size=8, workers=8, ran_s=300.0, gpu_s=2400.0)], now_s=300.0)
    assert answer("tiresias", view, original=True).wake_s == 300 + (3250 - 300) // 8
    assert answer("tiresias", view, queues=(3250, 7200)).wake_s == 300 + (3250 - 2400) / 8


def test_the_original_goes_down_one_queue_at_a_time() -> None:
    view = view_of(1, [job(size=1, workers=1, ran_s=9000.0, gpu_s=9000.0)], now_s=9000.0)
    assert answer("tiresias", view, original=True).memory.level.tolist() == [1]
    assert answer("tiresias", view, queues=(3250, 7200)).memory.level.tolist() == [2]


def test_waiting_leads_back_to_the_first_queue() -> None:
    trace = trace_of(
        [
            {"work": 100.0, "requested": 1, "submit_s": 0.0, "rate": [0, 1]},
            {"work": 100.0, "requested": 1, "submit_s": 0.0, "rate": [0, 1]},
        ]
    )
    # Limit 10, knob 2. The first runs 0-10 and is demoted; the second 10-20; it is demoted to the tail of the second
    # queue, where the first goes on at 20. The second has run 10 and waits until 40, then starts over: it runs 40-50
    # and waits behind the first, which has waited 10 + 10 by then and run 40: not enough to come back.
    found = run("tiresias", trace, "1x1", {"queues": "10", "promote": "2"})
    assert found.start_s.tolist() == [0.0, 10.0]
    assert found.finish_s.max() == 200.0
    never = run("tiresias", trace, "1x1", {"queues": "10"})
    assert never.finish_s.tolist() == [110.0, 200.0]
    assert found.finish_s[0] > never.finish_s[0]
    assert found.preemptions.sum() > never.preemptions.sum() == 2


def test_default_is_one_gpu_hour() -> None:
    rule = load("tiresias").rule
    assert rule is not None
    assert rule.levels is not None
    assert rule.levels.limits == (3600.0,)


@pytest.mark.parametrize("queues", ["7200,3250", "0,10", "10,10", "-1"])
def test_limits_must_ascend(queues: str) -> None:
    with pytest.raises(UsageError, match=r"queues is .*; it must be values separated by commas, ascending"):
        load("tiresias", {"queues": queues})


def test_promotion_cannot_be_negative() -> None:
    with pytest.raises(UsageError, match="promote"):
        load("tiresias", {"promote": "-1"})


def test_nothing_to_wait_for() -> None:
    view = view_of(4, [job(size=1, workers=1, gpu_s=9000.0, ran_s=9000.0)], now_s=9000.0)
    assert answer("tiresias", view).wake_s == math.inf
    assert workers_of("tiresias", view) == [1]


def test_a_waiting_job_stays_in_its_queue() -> None:
    """It goes down when it next runs, even if it was stopped just as it reached the limit."""
    first = answer("tiresias", view_of(1, [job(size=1), job(size=1)]))
    later = view_of(1, [job(size=1, gpu_s=3600.0, ran_s=3600.0), job(size=1, workers=1)], now_s=3600.0)
    assert answer("tiresias", later, first.memory).memory.level.tolist() == [0, 0]
