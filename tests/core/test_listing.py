"""Decisions of list policies against a walk written out, on any snapshot; and the reasons they give."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy_checks import answer, check_work_conserving, why, workers_of
from strategies import job, snapshots, view_of
from stretto.core import listing
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot

LISTS = ("fifo", "fit-first", "sjf", "srjf", "srtf", "srsf", "edf", "priority", "tiresias", "tiresias-gittins")


def size(view: Snapshot, j: int, name: str) -> int:
    if name == "srjf":
        return int(view.min_workers[j])
    return min(max(int(view.requested[j]), int(view.min_workers[j])), int(view.max_workers[j]))


def microseconds(view: Snapshot, j: int, workers: int) -> float:
    left, top = view.remaining[j], view.rates.shape[2] - 1
    rate = view.rates[0, view.curve[j], min(workers, top)]
    if math.isnan(left):
        return math.inf
    return round(left / rate * 1e6) if rate else (math.inf if left else 0)


def attained(view: Snapshot, j: int) -> float:
    return float(view.gpu_s[j])


KEYS: dict[str, Callable[[Snapshot, int], Any]] = {
    "fifo": lambda view, j: (view.workers[j] == 0, view.submit_s[j]),
    "fit-first": lambda view, j: (view.workers[j] == 0, view.submit_s[j]),
    "sjf": lambda view, j: size(view, j, "sjf") * view.width[j] + view.fixed_milli[j],
    "srjf": lambda view, j: microseconds(view, j, size(view, j, "srjf")),
    "srtf": lambda view, j: microseconds(view, j, size(view, j, "srtf")),
    "srsf": lambda view, j: (
        microseconds(view, j, size(view, j, "srsf")) * (size(view, j, "srsf") * view.width[j] + view.fixed_milli[j])
    ),
    "edf": lambda view, j: view.deadline_s[j],
    "priority": lambda view, j: (-view.priority[j], view.workers[j] == 0),
    # The first look at jobs that may have run before: those in the first queue, then those beyond its limit.
    "tiresias": lambda view, j: attained(view, j) >= 3600,
}


def walked(view: Snapshot, name: str) -> list[int]:
    """Workers by the definition: in order, what fits runs; the strict one stops at the first that does not."""
    stays = name in ("fifo", "fit-first")
    workers = [0] * len(view)
    free, blocked = view.total_milli, False
    for j in sorted(range(len(view)), key=lambda j: (KEYS[name](view, j), j)):
        running = bool(view.workers[j])
        count = int(view.workers[j]) if stays and running else size(view, j, name)
        need = count * int(view.width[j]) + int(view.fixed_milli[j])
        if need <= free and not blocked:
            workers[j] = count
            free -= need
        elif name == "fifo" and not running:
            blocked = True
    return workers


@given(view=snapshots())
def test_equals_the_walk_written_out(view: Snapshot) -> None:
    for name in KEYS:
        assert workers_of(name, view) == walked(view, name), name


@given(view=snapshots(elastic=False))
def test_nothing_that_fits_waits(view: Snapshot) -> None:
    for name in LISTS:
        if name not in ("fifo", "srjf"):
            check_work_conserving(name, view)


@given(view=snapshots(overfull=False))
def test_those_that_never_preempt_leave_running_jobs_alone(view: Snapshot) -> None:
    running = view.workers > 0
    for name in ("fifo", "fit-first"):
        assert np.array_equal(answer(name, view).workers[running], view.workers[running]), name


REMEMBER: list[tuple[str, dict[str, Any]]] = [
    ("srtf", {"original": True}),
    ("tiresias", {"queues": (5.0, 60.0), "promote": 2.0}),
    ("tiresias", {"queues": (5.0, 60.0), "promote": 2.0, "original": True}),
    ("tiresias-gittins", {"promote": 2.0}),
    ("tiresias-gittins", {"original": True}),
]


@given(earlier=snapshots(), later=snapshots())
def test_any_memory_of_other_times_is_survived(earlier: Snapshot, later: Snapshot) -> None:
    for name, options in REMEMBER:
        memory = answer(name, earlier, **options).memory
        decision = answer(name, later, memory, **options)
        kept = decision.memory if name == "srtf" else decision.memory.job
        assert sorted(kept.tolist()) == later.job.tolist()


@given(st.permutations(range(5)), snapshots(elastic=False, max_jobs=5))
def test_ties_keep_the_order_of_the_last_decision(listed: list[int], view: Snapshot) -> None:
    """All lengths unknown: every key is the same."""
    rule = listing.ListRule(falls="time", preempts=True, keeps_order=True)
    unknown = view.remaining + math.nan
    tied = Snapshot(**{**{f: getattr(view, f) for f in view.__struct_fields__}, "remaining": unknown})
    memory = np.array(listed)
    decision = listing.decide(rule, tied, memory)
    known = [number for number in listed if number in tied.job]
    assert decision.memory.tolist() == known + [n for n in tied.job.tolist() if n not in listed]


# Hand-computed.


def test_fifo_blocks_and_says_who() -> None:
    view = view_of(4, [job(size=3, workers=3), job(size=2), job(size=1)])
    decision = answer("fifo", view)
    assert decision.workers.tolist() == [3, 0, 0]
    assert [why(decision, j) for j in range(3)] == [Reason.RUNS, Reason.NO_ROOM, Reason.BEHIND_HEAD]
    assert decision.detail[1:].tolist() == [[2.0, 1.0], [2.0, 1.0]]


def test_fit_first_passes() -> None:
    view = view_of(4, [job(size=3, workers=3), job(size=2), job(size=1)])
    decision = answer("fit-first", view)
    assert decision.workers.tolist() == [3, 0, 1]
    assert decision.detail.tolist() == [[3.0, 4.0], [2.0, 1.0], [1.0, 1.0]]


def test_preempted_for_a_shorter_one() -> None:
    view = view_of(4, [job(size=4, workers=4, remaining=400.0), job(size=2, remaining=100.0)])
    decision = answer("srtf", view)
    assert decision.workers.tolist() == [0, 2]
    assert why(decision, 0) is Reason.PREEMPTED
    assert decision.detail[0].tolist() == [4.0, 2.0]


def test_srsf_weighs_by_width() -> None:
    jobs = [job(size=4, remaining=400.0), job(size=1, remaining=300.0)]  # 100 s x 4 GPUs, 300 s x 1 GPU
    assert workers_of("srtf", view_of(4, jobs)) == [4, 0]
    assert workers_of("srsf", view_of(4, jobs)) == [0, 1]


def test_srjf_gives_the_minimum() -> None:
    view = view_of(5, [job(min_workers=2, max_workers=4, remaining=8.0), job(min_workers=2, max_workers=4)])
    assert workers_of("srjf", view) == [2, 2]


def test_equal_priority_does_not_displace() -> None:
    jobs = [job(size=4, priority=1), job(size=2, priority=1, workers=2), job(size=2, priority=0, workers=2)]
    assert workers_of("priority", view_of(4, jobs)) == [0, 2, 2]
    urgent = [job(size=4, priority=2), *jobs[1:]]
    assert workers_of("priority", view_of(4, urgent)) == [4, 0, 0]


def test_too_large_for_the_cluster() -> None:
    decision = answer("srtf", view_of(4, [job(size=8), job(size=1)]))
    assert decision.workers.tolist() == [0, 1]
    assert why(decision, 0) is Reason.TOO_LARGE
    assert decision.detail[0].tolist() == [8.0, 4.0]


def test_a_lost_node_stops_the_later_ones_only() -> None:
    """Even a policy that never preempts cannot keep what is not there."""
    jobs = [job(size=2, workers=2), job(size=2, workers=2), job(size=1)]
    decision = answer("fifo", view_of(3, jobs))
    assert decision.workers.tolist() == [2, 0, 1]
    assert why(decision, 1) is Reason.PREEMPTED


@pytest.mark.parametrize("name", LISTS)
def test_no_jobs(name: str) -> None:
    assert answer(name, view_of(4, [])).wake_s == math.inf


def test_declarations_are_there_for_the_simulator() -> None:
    for name in LISTS:
        assert load(name).rule is not None
    assert load("edf", {"admission": "true"}).rule is None
