from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings

from policy_checks import check_ends, check_order, check_uncontended, check_work_conserving, run, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.snapshot import IntArray, Snapshot
from stretto.sim.trace import Trace

NAME = "elastic-srjf"
JOBS = [job(max_workers=4, remaining=left) for left in (100, 10, 50)]


def shortest_first(view: Snapshot) -> IntArray:
    seconds = np.rint(view.remaining / view.rate(view.min_workers) * 1e6)
    seconds[np.isnan(seconds)] = math.inf
    return np.array(sorted(range(len(view)), key=lambda j: (seconds[j], j)), np.int64)


def test_the_shortest_get_their_minimum_first() -> None:
    assert workers_of(NAME, view_of(2, JOBS)) == [0, 1, 1]


def test_the_rest_goes_round_in_the_same_order() -> None:
    assert workers_of(NAME, view_of(4, JOBS)) == [1, 2, 1]
    assert workers_of(NAME, view_of(8, JOBS)) == [2, 3, 3]


def test_time_left_counts_at_the_minimum() -> None:
    """60 steps on 4 workers are sooner done than 20 on one."""
    jobs = [job(remaining=20), job(min_workers=4, max_workers=4, remaining=60)]
    assert workers_of(NAME, view_of(4, jobs)) == [0, 4]


def test_unknown_lengths_come_last() -> None:
    assert workers_of(NAME, view_of(1, [job(remaining=math.nan), job(remaining=1e6)])) == [0, 1]


def test_a_trace_by_hand() -> None:
    """4 and 2 workers would be srtf; in turns both get 3. The shorter ends at 4, the other at 4 + 12 / 4."""
    trace = trace_of([{"max_workers": 4, "work": 24}, {"max_workers": 4, "work": 12}])
    assert run(NAME, trace, "1x6").finish_s.tolist() == [7, 4]


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    check_order(NAME, view, shortest_first(view))
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@settings(max_examples=30)
@given(traces())
def test_every_trace_ends(trace: Trace) -> None:
    check_ends(NAME, trace)
