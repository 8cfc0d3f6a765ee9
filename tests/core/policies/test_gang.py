from __future__ import annotations

import pytest
from hypothesis import given

from policy_checks import answer, run, workers_of
from strategies import job, snapshots, trace_of, view_of
from stretto.core.snapshot import Snapshot
from stretto.errors import UsageError

NAME = "gang"


def test_two_jobs_of_four_on_six_gpus_run_one_after_the_other() -> None:
    trace = trace_of([{"min_workers": 1, "requested": 4, "work": 24}] * 2)
    result = run(NAME, trace, "1x6")
    assert result.start_s.tolist() == [0, 6]
    assert result.finish_s.tolist() == [6, 12]
    assert result.gpu_s.tolist() == [24, 24]


def test_a_gang_that_does_not_fit_holds_nothing_and_is_passed() -> None:
    view = view_of(6, [job(size=4), job(size=4), job(size=2)])
    assert workers_of(NAME, view) == [4, 0, 2]


def test_without_skipping_nobody_passes() -> None:
    view = view_of(6, [job(size=4), job(size=4), job(size=2)])
    assert workers_of(NAME, view, skip="false") == [4, 0, 0]


def test_an_option_that_is_no_yes_or_no_is_refused() -> None:
    with pytest.raises(UsageError, match="skip"):
        answer(NAME, view_of(1, []), skip="perhaps")


@given(snapshots(elastic=False))
def test_any_snapshot(view: Snapshot) -> None:
    assert workers_of(NAME, view) == workers_of("fit-first", view)
    assert workers_of(NAME, view, skip=False) == workers_of("fifo", view)
