"""Workers that are added take a while to take part, and those that are taken away to go."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import run
from strategies import trace_of, traces
from stretto.sim.trace import ELASTIC, RESTART, Trace
from stretto.sim.world import Result, Settings

WIDE = {"work": 20.0, "min_workers": 1, "max_workers": 4}


def ends(jobs: list[dict[str, Any]], cluster: str = "1x2", level: int = ELASTIC, **world: Any) -> Result:
    trace = trace_of(jobs)
    trace = msgspec.structs.replace(trace, level=np.full(len(trace), level))
    return run("elastic-fifo", trace, cluster, world=msgspec.convert(world, Settings))


GROWS = [{"work": 10.0, "min_workers": 1, "max_workers": 2}, {"work": 2.0}]
SHRINKS = [{"work": 10.0, "min_workers": 1, "max_workers": 2}, {"work": 4.0, "submit_s": 2.0}]


def test_until_newcomers_take_part_a_job_goes_on_as_it_was() -> None:
    assert ends(GROWS).finish_s.tolist() == [6.0, 2.0]
    late = ends(GROWS, join_s=1.0)
    assert late.finish_s.tolist() == [6.5, 2.0]
    assert not late.paused_s.any()
    assert ends(GROWS, join_s=1.0, resize_s=0.5).finish_s.tolist() == [7.0, 2.0]


def test_it_may_end_before_they_do() -> None:
    assert ends(GROWS, join_s=20.0).finish_s.tolist() == [10.0, 2.0]


def test_a_job_that_is_restarted_has_nobody_who_goes_on() -> None:
    paused = ends(GROWS, level=RESTART, join_s=1.0, resize_s=1.0)
    assert paused.finish_s.tolist() == ends(GROWS, level=RESTART, resize_s=1.0).finish_s.tolist()


def test_room_that_was_taken_away_is_free_a_little_later() -> None:
    assert ends(SHRINKS).finish_s.tolist() == [7.0, 6.0]
    assert ends(SHRINKS, leave_s=0.5).finish_s.tolist() == pytest.approx([7.25, 6.5])


def test_a_job_that_shrinks_while_others_join_it_loses_nothing() -> None:
    """At 2 s the first ends and the wide one is to have 4 workers by 5 s; at 3 s another one takes two of these."""
    jobs = [WIDE, {"work": 4.0, "requested": 2}, {"work": 8.0, "requested": 2, "submit_s": 3.0}]
    result = ends(jobs, "1x4", join_s=3.0)
    # 2 workers all the time from 0 to 7 s: 14 steps; then 4 from 10 s on.
    assert result.finish_s.tolist()[1:] == [2.0, 7.0]
    assert result.finish_s[0] == pytest.approx(10.0)


@settings(max_examples=60)
@given(
    trace=traces(),
    join_s=st.sampled_from([0.0, 0.5, 7.0]),
    leave_s=st.sampled_from([0.0, 0.3, 5.0]),
    resize_s=st.sampled_from([0.0, 0.2, 3.0]),
    policy=st.sampled_from(["elastic-fifo", "afs-l", "stretto"]),
)
def test_nothing_is_faster_than_its_workers_allow(
    trace: Trace, join_s: float, leave_s: float, resize_s: float, policy: str
) -> None:
    world = Settings(join_s=join_s, leave_s=leave_s, resize_s=resize_s, start_s=0.1)
    result = run(policy, trace, "1x8", world=world)
    best = np.array([trace.rates[0, c, : m + 1].max() for c, m in zip(trace.curve, trace.max_workers, strict=True)])
    assert np.isfinite(result.finish_s).all()
    assert (result.finish_s - result.start_s >= trace.work / best - 1e-6 * trace.work).all()
    assert (result.paused_s >= -1e-9).all()
