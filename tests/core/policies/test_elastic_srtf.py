from __future__ import annotations

import itertools
import math

from hypothesis import given, settings

from policy_checks import answer, check_ends, check_order, check_uncontended, check_work_conserving, run, workers_of
from strategies import job, snapshots, trace_of, traces, view_of
from stretto.core.listing import remaining
from stretto.core.snapshot import Snapshot
from stretto.sim.trace import Trace

NAME = "elastic-srtf"
JOBS = [job(max_workers=4, remaining=left) for left in (100, 10, 50)]


def test_everybody_has_its_minimum_before_the_shortest_grows() -> None:
    assert workers_of(NAME, view_of(2, JOBS)) == [0, 1, 1]
    assert workers_of(NAME, view_of(6, JOBS)) == [1, 4, 1]
    assert workers_of(NAME, view_of(8, JOBS)) == [1, 4, 3]


def test_unknown_lengths_come_last() -> None:
    jobs = [job(max_workers=4, remaining=math.nan), job(max_workers=4, remaining=1e6)]
    assert workers_of(NAME, view_of(5, jobs)) == [1, 4]


def test_a_trace_by_hand() -> None:
    """The shorter job runs on 4 for 3 s, the other on 2; it has 18 of 24 left, on 4."""
    trace = trace_of([{"max_workers": 4, "work": 24}, {"max_workers": 4, "work": 12}])
    assert run(NAME, trace, "1x6").finish_s.tolist() == [7.5, 3]


@given(snapshots())
def test_any_snapshot(view: Snapshot) -> None:
    order = sorted(range(len(view)), key=lambda j: (remaining(view, view.min_workers)[j], j))
    check_order(NAME, view, view.job.searchsorted(view.job[order]))
    check_work_conserving(NAME, view)
    check_uncontended(NAME, view)


@given(snapshots(known=True))
def test_the_first_that_runs_has_all_it_can_use_beside_the_minimums(view: Snapshot) -> None:
    workers = answer(NAME, view).workers
    order = sorted(range(len(view)), key=lambda j: (remaining(view, view.min_workers)[j], j))
    running = [j for j in order if workers[j]]
    for earlier, later in itertools.pairwise(running):
        if workers[later] > view.min_workers[later] and view.width[earlier] <= view.width[later]:
            more = workers[earlier] + 1
            assert (
                more > view.max_workers[earlier] or view.rate(workers)[earlier] == view.rate(view.max_workers)[earlier]
            )


@settings(max_examples=30)
@given(traces())
def test_every_trace_ends(trace: Trace) -> None:
    check_ends(NAME, trace)
