"""`fits` says yes exactly when there is a way to place everybody."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given

from placement_cases import Case, cases, every_placement, make
from strategies import job, view_of
from stretto.core.fits import fits
from stretto.core.snapshot import GPU


@given(case=cases(widths=(GPU, 2 * GPU), roles=False, pools=1, max_nodes=2, max_jobs=3))
def test_yes_means_that_there_is_a_placement(case: Case) -> None:
    small = case._replace(workers=np.minimum(case.workers, 4))
    answer = fits(small.view, small.workers, small.pool)
    possible = bool(every_placement(small))
    assert possible or not answer, "said yes, but there is none"


@given(case=cases(widths=(GPU, 2 * GPU, 4 * GPU), demands=False, roles=False, pools=1, max_nodes=2, max_jobs=3))
def test_with_whole_gpus_in_powers_of_two_no_means_that_there_is_none(case: Case) -> None:
    small = case._replace(workers=np.minimum(case.workers, 4))
    assert fits(small.view, small.workers, small.pool) == bool(every_placement(small))


def test_where_gpus_are_only_counted_capacity_decides() -> None:
    view = view_of(4, [job(size=2), job(size=2, fixed_milli=500)])
    counted = msgspec.structs.replace(
        view, nodes=msgspec.structs.replace(view.nodes, name=(), devices=np.empty(0, np.int64))
    )
    assert fits(counted, np.array([2, 1]))
    assert not fits(counted, np.array([2, 2]))


def test_room_in_all_but_on_no_node() -> None:
    case = make([2, 2], [job(size=1, width=3 * GPU)])
    assert not fits(case.view, case.workers, case.pool)
    assert fits(case.view, np.array([0]), case.pool)


def test_moves_are_allowed() -> None:
    jobs = [job(size=1), job(size=1), job(size=1, width=4 * GPU)]
    case = make([4, 4], jobs, placed=[[1, 0], [0, 1], [0, 0]])
    assert fits(case.view, case.workers, case.pool)


def test_a_pool_that_does_not_exist_holds_nothing() -> None:
    case = make([4], [job(size=1)])
    assert not fits(case.view, case.workers, np.array([3]))
