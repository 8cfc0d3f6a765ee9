"""Jobs that come in certain sizes only get no other, whatever the policy decides."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import answer, run
from strategies import job, snapshots, view_of
from stretto.core import invariants, steps
from stretto.core.decision import Decision
from stretto.core.policies import BUILTIN
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.request import POWERS_OF_TWO, JobRequest
from stretto.core.snapshot import IntArray, Snapshot
from stretto.errors import PolicyError, TraceError
from stretto.sim.readers import plain, read
from stretto.sim.trace import Trace
from stretto.sim.world import Settings

CHEAP = {"pollux": {"population": 8, "generations": 5}}


def stepped(view: Snapshot, step: list[int]) -> Snapshot:
    return msgspec.structs.replace(view, step=np.array(step, np.int64))


def allowed(view: Snapshot, j: int) -> tuple[int, ...]:
    """By the definition that the job file uses."""
    assert view.step is not None
    low, high, step = int(view.min_workers[j]), int(view.max_workers[j]), int(view.step[j])
    return JobRequest(name="a", klass="a", min_workers=low, max_workers=high, step=step).sizes()


@st.composite
def stepped_snapshots(draw: st.DrawFn, services: bool = False, pools: int = 1, placed: bool = False) -> Snapshot:
    view = draw(snapshots(services=services, pools=pools, placed=placed))
    kinds = st.sampled_from([POWERS_OF_TWO, 1, 2, 3, 5])
    return stepped(view, [draw(kinds) for _ in range(len(view))])


@given(view=stepped_snapshots(), share=st.floats(0, 1))
def test_the_largest_possible_size_against_a_list_of_them(view: Snapshot, share: float) -> None:
    asked = view.min_workers + np.floor(share * (view.max_workers - view.min_workers)).astype(np.int64)
    found = steps.possible(view, asked)
    assert found.tolist() == [max(n for n in allowed(view, j) if n <= asked[j]) for j in range(len(view))]
    assert steps.possible(view, np.zeros_like(asked)).tolist() == [0] * len(view)


@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=15)
@given(view=stepped_snapshots(services=True, pools=2))
def test_no_policy_gives_another_size(name: str, view: Snapshot) -> None:
    """`answer` checks the invariants as well: nothing that fitted stops fitting."""
    decision = answer(name, view, **CHEAP.get(name, {}))
    for j, n in enumerate(decision.workers.tolist()):
        assert n == 0 or n in allowed(view, j)
    anything = load(name, CHEAP.get(name)).decide(msgspec.structs.replace(view, step=None), None)
    assert ((decision.workers > 0) == (anything.workers > 0)).all(), "nobody is stopped for it"
    less = decision.workers < anything.workers
    assert (decision.reason[less] == Reason.CUT_TO_STEP).all()
    assert np.array_equal(decision.detail[less], np.column_stack((decision.workers, anything.workers))[less])


def test_a_size_in_between_is_refused() -> None:
    view = stepped(view_of(8, [job(min_workers=2, max_workers=8)]), [3])
    good, wrong = (Decision.of(view, np.array([n]), np.array([1])) for n in (5, 6))
    invariants.check(load("stretto"), view, good)
    with pytest.raises(PolicyError, match="not one of its sizes"):
        invariants.check(load("stretto"), view, wrong)


@given(view=stepped_snapshots(placed=True))
def test_where_workers_are_the_smallest_pieces_go_first(view: Snapshot) -> None:
    trimmed = steps.trimmed(view, view.placed)
    assert np.array_equal(trimmed.sum(axis=1), steps.possible(view, view.placed.sum(axis=1)))
    assert (trimmed >= 0).all()
    for before, after in zip(view.placed.tolist(), trimmed.tolist(), strict=True):
        touched = [b for b, a in zip(before, after, strict=True) if a < b]
        whole = [b for b, a in zip(before, after, strict=True) if a == b and b]
        assert not touched or not whole or max(touched) <= min(whole)


def trace(path: Path, step: str) -> Trace:
    path.write_text(
        f"job_id,submit_s,gpus,duration_s,min,max,step,speedup\na,0,4,400,2,9,{step},linear\nb,100,4,400,1,9,,linear\n"
    )
    return read(path, "csv", {})


@pytest.mark.parametrize(("step", "sizes"), [("3", {2, 5, 8}), ("pow2", {2, 4, 8}), ("", set(range(2, 10)))])
@pytest.mark.parametrize("placement", ["", "pack"])
def test_a_step_in_a_trace_is_honoured(tmp_path: Path, step: str, sizes: set[int], placement: str) -> None:
    jobs = trace(tmp_path / "jobs.csv", step)
    world = Settings(record=True, placement=placement)
    for name in ("stretto", "elastic-fifo"):
        had = {c.workers for c in run(name, jobs, "3x3", world=world).changes if c.job == 0}
        assert had - {0} <= sizes
        assert max(had) == max(sizes), "alone it takes all it can"


def test_steps_are_written_as_they_were_read(tmp_path: Path) -> None:
    jobs = trace(tmp_path / "jobs.csv", "pow2")
    step: IntArray | None = jobs.step
    assert step is not None
    assert step.tolist() == [POWERS_OF_TWO, 1]
    assert [row.get("step") for row in plain.rows_of(jobs)] == ["pow2", None]
    with (tmp_path / "again.csv").open("w") as file:
        plain.write(plain.rows_of(jobs), file)
    again = read(tmp_path / "again.csv", "csv", {})
    assert again.step is not None
    assert np.array_equal(again.step, step)
    for wrong in ("0", "-1", "1.5", "two"):
        with pytest.raises(TraceError, match="step"):
            trace(tmp_path / "wrong.csv", wrong)
