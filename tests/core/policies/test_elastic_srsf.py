from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings

from policy_checks import answer, check_ends, check_order, check_uncontended, check_work_conserving, why, workers_of
from strategies import job, snapshots, traces, view_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot
from stretto.sim.trace import Trace

NAME = "elastic-srsf"


def test_order_is_by_gpu_seconds() -> None:
    """10 s on 2 GPUs are more service than 15 s on 1, though less time."""
    jobs = [job(size=2, remaining=20), job(size=1, remaining=15)]
    assert workers_of(NAME, view_of(2, jobs)) == [0, 1]
    assert workers_of("elastic-srtf", view_of(2, jobs)) == [2, 0]


def test_the_rest_goes_where_the_speed_up_is() -> None:
    flat = job(max_workers=4, rate=[0, 10, 11, 12, 13], remaining=1)
    steep = job(max_workers=4, rate=[0, 1, 1.9, 2.7, 3.4], remaining=100)
    decision = answer(NAME, view_of(4, [flat, steep | {"workers": 1}]))
    assert decision.workers.tolist() == [1, 3]
    assert why(decision, 1) is Reason.GROWN
    assert decision.detail[1, 0] == 2.7 - 1.9


def test_gain_counts_per_gpu() -> None:
    """0.6 for one GPU is more than 1.0 for two."""
    wide = job(max_workers=2, width=2 * GPU, rate=[0, 1, 2])
    narrow = job(max_workers=3, rate=[0, 1, 1.6, 2.2])
    assert workers_of(NAME, view_of(5, [wide, narrow])) == [1, 3]


def test_unknown_lengths_come_last() -> None:
    assert workers_of(NAME, view_of(1, [job(remaining=math.nan), job(remaining=1e6)])) == [0, 1]


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    need = (view.min_workers * view.width + view.fixed_milli) / GPU
    seconds = np.rint(view.remaining / view.rate(view.min_workers) * 1e6)
    service = [math.inf if math.isnan(s) else s * n for s, n in zip(seconds, need, strict=True)]
    check_order(NAME, view, np.array(sorted(range(len(view)), key=lambda j: (service[j], j)), np.int64))
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@settings(max_examples=30)
@given(traces())
def test_every_trace_ends(trace: Trace) -> None:
    check_ends(NAME, trace)
