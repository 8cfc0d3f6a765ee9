"""What holds for every placement, by name, on any world."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_cases import Case, cases, faults, make, one_more_fits, seats_of, with_placed
from strategies import job
from stretto.core import placement
from stretto.core.placement import BUILTIN, sharing
from stretto.core.placement.room import shapes_of
from stretto.core.snapshot import GPU
from stretto.errors import UsageError

NAMES = sorted(BUILTIN)
MOVES_NOTHING = ["fill", "pack", "spread"]


@pytest.mark.parametrize("name", NAMES)
@given(case=cases())
def test_a_placement_is_within_every_limit_deterministic_and_settled(name: str, case: Case) -> None:
    place = placement.load(name)
    placed = place(*case)
    assert placed.shape == (len(case.view), len(case.view.nodes.name))
    assert placed.dtype == np.int64
    assert (placed >= 0).all()
    assert faults(case.view, placed, case.pool) == []
    got = placed.sum(axis=1)
    full, enough = got == case.workers, (got >= case.view.min_workers) & (got < case.workers)
    assert (full | enough | (got == 0)).all()
    assert np.array_equal(place(*case), placed)
    assert np.array_equal(place(*with_placed(case, placed)), placed), "placing again what is placed moves something"
    assert seats_of(case, placed) is not None


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(widths=(GPU, 250, 340, 460, 500, 700), pools=1, max_nodes=2))
def test_shares_too_hard_to_pack_in_time_are_left_out_cleanly(name: str, case: Case) -> None:
    """Without any time for a search, best fit decreasing has the last word: less is placed, nothing is broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "_SEARCH_STEPS", 0)
        placed = placement.load(name)(*case)
    assert faults(case.view, placed, case.pool) == []
    got = placed.sum(axis=1)
    assert ((got == case.workers) | (got >= case.view.min_workers) | (got == 0)).all()


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(widths=(GPU,), roles=False))
def test_no_job_goes_short_of_a_whole_gpu_that_it_could_have(name: str, case: Case) -> None:
    placed = placement.load(name)(*case)
    got = placed.sum(axis=1)
    for j in np.flatnonzero(got < case.workers).tolist():
        if got[j] or case.view.min_workers[j] == 1:
            assert not one_more_fits(case, placed, j), f"job {j}"


@pytest.mark.parametrize("name", NAMES)
@given(case=cases(widths=(GPU,), roles=False, demands=False, pools=1))
def test_plain_workers_fill_the_cluster_to_the_last_device(name: str, case: Case) -> None:
    placed = placement.load(name)(*case)
    got = placed.sum(axis=1)
    free = int(case.view.nodes.devices.sum() - got.sum())
    for j in np.flatnonzero(got < case.workers).tolist():
        assert free < (1 if got[j] else case.view.min_workers[j]), f"{free} devices are free, job {j} has {got[j]}"


@pytest.mark.parametrize("name", MOVES_NOTHING)
@given(case=cases(roles=False))
def test_running_workers_stay_while_they_may(name: str, case: Case) -> None:
    placed = placement.load(name)(*case)
    right = (case.view.nodes.pool[None, :] == case.pool[:, None]) & (case.view.nodes.devices > 0)[None, :]
    old = np.where(right, case.view.placed, 0)
    for j in np.flatnonzero(placed.any(axis=1)).tolist():
        if old[j].sum() <= case.workers[j]:
            assert (placed[j] >= old[j]).all(), f"job {j} moved"
        else:
            assert (placed[j] <= old[j]).all(), f"job {j} shrank and moved"


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_world_is_no_problem(name: str) -> None:
    place = placement.load(name)
    assert place(*make([4, 4], [])).shape == (0, 2)
    assert place(*make([], [job(size=1)])).shape == (1, 0)
    assert place(*make([0, 0], [job(size=1)])).sum() == 0


@pytest.mark.parametrize("name", NAMES)
def test_gpus_that_are_only_counted_so_far_are_placed(name: str) -> None:
    case = make([2], [job(size=2)])
    view = msgspec.structs.replace(case.view, placed=np.zeros((1, 0), np.int64))
    assert placement.load(name)(view, case.workers, case.pool).tolist() == [[2]]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"fewest-moves.*pack") as error:
        placement.load("fewest-move")
    assert "did you mean 'fewest-moves'" in str(error.value)


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_a_lost_node_empties_and_the_rest_stays(data: st.DataObject, name: str) -> None:
    devices = data.draw(st.lists(st.sampled_from([2, 4]), min_size=2, max_size=4))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    before = make(devices, [job(min_workers=1, max_workers=4) for _ in sizes], want=sizes)
    placed = placement.load(name)(*before)
    lost = data.draw(st.integers(0, len(devices) - 1))
    devices[lost] = 0
    after = make(devices, [job(min_workers=1, max_workers=4) for _ in sizes], placed=placed, want=sizes)
    again = placement.load(name)(*after)
    assert again[:, lost].sum() == 0
    if name in MOVES_NOTHING:
        others = [n for n in range(len(devices)) if n != lost]
        assert (again[:, others] >= placed[:, others]).all()


@given(case=cases())
def test_shapes_are_the_different_rows_in_order(case: Case) -> None:
    """As numpy finds them, which takes longer for a few dozen jobs."""
    shapes, index = shapes_of(case.view, case.pool)
    columns = np.column_stack((case.pool, case.view.width, case.view.demand))
    rows, numbers = np.unique(columns, axis=0, return_inverse=True)
    if case.view.reach is None:
        assert index.tolist() == numbers.reshape(-1).tolist()
        assert [(shape.pool, shape.cpu_milli) for shape in shapes] == [(row[0], row[2]) for row in rows.tolist()]
