from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from policy_checks import answer, check_ends, check_uncontended, check_work_conserving, run, why, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.errors import UsageError
from stretto.sim.trace import Trace

NAME = "elastic-tiresias"


def test_a_job_with_much_service_gives_way_but_keeps_what_is_left() -> None:
    jobs = [job(max_workers=4, workers=4, gpu_s=4000, ran_s=1000), job(max_workers=4, submit_s=1000.0)]
    decision = answer(NAME, view_of(6, jobs, now_s=1000.0))
    assert decision.workers.tolist() == [2, 4]
    assert why(decision, 0) is Reason.SHRUNK


def test_two_jobs_of_four_on_six_gpus_overlap() -> None:
    """Requested sizes go first: 4 and, by gain, 2. The second has 12 of 24 left when the first ends."""
    result = run(NAME, trace_of([{"max_workers": 4, "work": 24}] * 2), "1x6")
    assert result.finish_s.tolist() == [6, 9]


def crowd(options: dict[str, int]) -> list[int]:
    """A wide job in the second queue that gains little from its workers, and twelve narrow ones behind it."""
    wide = job(max_workers=14, workers=14, gpu_s=5000, rate=[0, 1, *np.linspace(1.5, 2.0, 13)])
    narrow = job(size=2, gpu_s=5000)
    return workers_of(NAME, view_of(16, [wide] + [narrow] * 12), **options)


def test_with_many_left_out_lower_queues_shrink_to_their_minimum() -> None:
    """11 wait: the wide job shrinks to 1; of 13 GPUs six more narrow jobs take 12, the wide one the last."""
    assert crowd({}) == [2] + [2] * 7 + [0] * 5
    assert crowd({"pending": 11}) == [14, 2] + [0] * 11


def test_first_queue_jobs_are_not_compacted() -> None:
    wide = job(max_workers=14, workers=14, gpu_s=100, rate=[0, 1, *np.linspace(1.5, 2.0, 13)])
    assert workers_of(NAME, view_of(16, [wide] + [job(size=2)] * 12)) == [14, 2] + [0] * 11


def test_the_requested_size_is_kept_within_the_useful_range() -> None:
    jobs = [job(requested=64, max_workers=8, rate=[0, 1, 2, 3, 3]), job(requested=1, min_workers=2, max_workers=2)]
    assert workers_of(NAME, view_of(8, jobs)) == [3, 2]


def test_it_wakes_when_a_job_reaches_the_end_of_its_queue() -> None:
    decision = answer(NAME, view_of(4, [job(max_workers=4, gpu_s=1600)], now_s=10.0))
    assert decision.workers.tolist() == [4]
    assert decision.wake_s == 510.0
    below = answer(NAME, view_of(4, [job(max_workers=4, workers=4, gpu_s=3600)], now_s=510.0), decision.memory)
    assert below.wake_s == math.inf
    assert below.memory.level.tolist() == [1]
    assert answer(NAME, view_of(4, [job(max_workers=4, gpu_s=1600)]), queues="2000,3000").wake_s == 100.0


def test_a_job_left_out_in_a_lower_queue_is_told_so() -> None:
    jobs = [job(size=4), job(size=4, gpu_s=5000)]
    decision = answer(NAME, view_of(4, jobs))
    assert why(decision, 1) is Reason.LOWER_QUEUE
    assert decision.detail[1].tolist() == [1, 0]


def test_queues_must_ascend() -> None:
    with pytest.raises(UsageError, match="queues"):
        answer(NAME, view_of(1, []), queues="7200,3250")


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@given(snapshots(overfull=False))
def test_any_memory(view: Snapshot) -> None:
    """Asked again later, with other jobs and its own memory, it still answers properly."""
    first = answer(NAME, view)
    later = msgspec.structs.replace(
        view,
        now_s=view.now_s + 1000,
        workers=first.workers,
        pool=np.where(first.workers > 0, first.pool, -1),
        gpu_s=view.gpu_s + 1000 * first.workers * view.width / GPU,
        ran_s=view.ran_s + np.where(first.workers > 0, 1000, 0),
        waited_s=view.waited_s + np.where(first.workers > 0, 0, 1000),
        job=view.job + 1,
    )
    second = answer(NAME, later, first.memory)
    assert (np.diff(second.memory.level) >= 0).all()


@settings(max_examples=30)
@given(traces())
def test_every_trace_ends(trace: Trace) -> None:
    check_ends(NAME, trace, queues="50,200")
