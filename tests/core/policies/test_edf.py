"""Deadline order and admission by plan."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given

from policy_checks import answer, run, why, workers_of
from strategies import job, snapshots, trace_of, view_of
from stretto.core.reasons import Reason
from stretto.core.snapshot import Snapshot


def due(size: int, seconds: float, deadline_s: float, **more: object) -> dict[str, object]:
    """A rigid job that needs so many seconds at its size."""
    return job(size=size, remaining=seconds * size, deadline_s=deadline_s, **more)


def test_the_earlier_deadline_displaces() -> None:
    view = view_of(4, [due(4, 10, 100.0, workers=4), due(2, 10, 50.0), due(2, 10, math.inf)])
    assert workers_of("edf", view) == [0, 2, 2]


def test_who_would_be_late_is_turned_away() -> None:
    view = view_of(4, [due(4, 10, 10.0), due(4, 10, 19.0), due(4, 10, 20.0)])
    decision = answer("edf", view, admission=True)
    assert decision.rejected is not None
    assert decision.rejected.tolist() == [False, True, False]
    assert decision.workers.tolist() == [4, 0, 0]
    assert why(decision, 1) is Reason.REJECTED_DEADLINE
    assert decision.memory.tolist() == [0, 2]


def test_who_would_make_others_late_is_turned_away() -> None:
    """The newcomer is more urgent than an admitted job, and could itself be in time."""
    waiting = due(4, 10, 12.0)
    view = view_of(4, [waiting, due(4, 5, 6.0)])
    first = answer("edf", view_of(4, [waiting]), admission=True)
    decision = answer("edf", view, first.memory, admission=True)
    assert decision.rejected is not None
    assert decision.rejected.tolist() == [False, True]


def test_a_job_that_is_late_anyway_blocks_nobody() -> None:
    view = view_of(4, [due(2, 100, 50.0, workers=2), due(2, 10, 60.0)])
    decision = answer("edf", view, admission=True)
    assert decision.rejected is not None
    assert decision.rejected.tolist() == [False, False]


def test_without_a_deadline_everybody_stays() -> None:
    view = view_of(4, [due(4, 10, 10.0), due(4, 10, math.inf), due(9, 1, math.inf)])
    decision = answer("edf", view, admission=True)
    assert decision.rejected is not None
    assert not decision.rejected.any()


def test_unknown_lengths_cannot_be_promised() -> None:
    view = view_of(4, [job(size=1, remaining=math.nan, deadline_s=1e9), job(size=1, remaining=math.nan)])
    decision = answer("edf", view, admission=True)
    assert decision.rejected is not None
    assert decision.rejected.tolist() == [True, False]


@given(view=snapshots())
def test_a_promise_is_kept(view: Snapshot) -> None:
    """Whoever was admitted is never rejected later."""
    first = answer("edf", view, admission=True)
    again = answer("edf", view, first.memory, admission=True)
    assert first.rejected is not None
    assert again.rejected is not None
    assert not (again.rejected & ~first.rejected).any()


def test_admitted_jobs_meet_their_deadlines() -> None:
    """With exact lengths and free preemption the plan comes true: nobody admitted ends late."""
    jobs = [
        {"work": float(10 + 7 * i % 23) * (1 + i % 3), "requested": 1 + i % 3, "max_workers": 1 + i % 3,
         "min_workers": 1 + i % 3, "submit_s": float(3 * i)}
        for i in range(30)
    ]  # fmt: skip
    trace = trace_of(jobs)
    deadlines = trace.submit_s + 1.6 * trace.duration_s
    trace = msgspec.structs.replace(trace, deadline_s=deadlines)
    result = run("edf", trace, "1x4", {"admission": True})
    kept = ~result.rejected
    assert 5 < kept.sum() < 30
    assert (result.finish_s[kept] <= deadlines[kept] + 1e-6).all()
    hopeful = run("edf", trace, "1x4")
    assert (hopeful.finish_s <= deadlines + 1e-6).sum() < kept.sum()
