"""Nodes that some jobs may not go to: selectors, taints and cordons, as a placement sees them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_cases import Case, cases, faults, make, one_more_fits, with_placed
from strategies import job
from stretto.core import placement
from stretto.core.fits import fits
from stretto.core.placement import BUILTIN
from stretto.core.snapshot import GPU, BoolArray

NAMES = sorted(BUILTIN)


def within(case: Case, reach: BoolArray) -> Case:
    return case._replace(view=msgspec.structs.replace(case.view, reach=reach))


@st.composite
def reached(draw: st.DrawFn, **options: object) -> Case:
    case = draw(cases(**options))  # type: ignore[arg-type]
    shape = len(case.view), len(case.view.nodes.name)
    bits = draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return within(case, np.array(bits, np.bool_).reshape(shape))


@pytest.mark.parametrize("name", NAMES)
@given(case=reached())
def test_new_workers_go_where_they_may(name: str, case: Case) -> None:
    placed = placement.load(name)(*case)
    assert case.view.reach is not None
    assert faults(case.view, placed, case.pool) == []
    came = (placed > case.view.placed) & ~case.view.reach
    assert not came.any()
    got = placed.sum(axis=1)
    assert ((got == case.workers) | (got >= case.view.min_workers) | (got == 0)).all()
    assert np.array_equal(placement.load(name)(*with_placed(case, placed)), placed), "placed again, something moves"


@pytest.mark.parametrize("name", NAMES)
@given(case=reached(widths=(GPU,), roles=False))
def test_no_job_goes_short_of_a_gpu_within_its_reach(name: str, case: Case) -> None:
    placed = placement.load(name)(*case)
    reach = case.view.reach
    assert reach is not None
    for j in np.flatnonzero(placed.sum(axis=1) < case.workers).tolist():
        if placed[j].any() or case.view.min_workers[j] == 1:
            closed = np.where(reach[j], case.view.nodes.devices, placed[:, :].sum(axis=0))
            nodes = msgspec.structs.replace(case.view.nodes, devices=np.minimum(case.view.nodes.devices, closed))
            inside = case._replace(view=msgspec.structs.replace(case.view, nodes=nodes))
            assert not one_more_fits(inside, placed, j), f"job {j}"


@pytest.mark.parametrize("name", NAMES)
def test_who_runs_on_a_node_that_was_closed_stays(name: str) -> None:
    case = make([4, 4], [job(min_workers=1, max_workers=6)], placed=np.array([[3, 0]]), want=[6])
    placed = placement.load(name)(*within(case, np.array([[False, True]])))
    assert placed.tolist() == [[3, 3]]


def test_what_fits_is_a_matter_of_reach() -> None:
    case = make([2, 2], [job(size=3)], want=[3])
    assert fits(case.view, case.workers)
    assert not fits(within(case, np.array([[True, False]])).view, case.workers)
