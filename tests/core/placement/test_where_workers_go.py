"""Small worlds, worked out by hand: what tells the placements apart."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_cases import Case, cases, every_placement, make
from strategies import job
from stretto.core import placement
from stretto.core.placement import fewest_moves
from stretto.core.placement.placing import Cells
from stretto.core.snapshot import GPU


def where(name: str, case: Case) -> list[list[int]]:
    return placement.load(name)(*case).tolist()


def moved(before: np.ndarray, after: np.ndarray) -> int:
    """Workers that left one node and turned up on another, counted job by job."""
    total = 0
    for old, new in zip(before.tolist(), after.tolist(), strict=True):
        came = sum(max(n - o, 0) for o, n in zip(old, new, strict=True))
        went = sum(max(o - n, 0) for o, n in zip(old, new, strict=True))
        total += min(came, went)
    return total


def test_fill_fills_one_server_and_then_the_next() -> None:
    assert where("fill", make([4, 4, 4], [job(size=3), job(size=3), job(size=2)])) == [[3, 0, 0], [1, 2, 0], [0, 2, 0]]


def test_spread_goes_round_the_servers_and_keeps_a_job_together() -> None:
    jobs = [job(size=2), job(size=2), job(size=2), job(size=1)]
    assert where("spread", make([4, 4, 4], jobs)) == [[2, 0, 0], [0, 2, 0], [0, 0, 2], [1, 0, 0]]


def test_spread_deals_out_what_no_server_holds() -> None:
    assert where("spread", make([4, 4, 2], [job(size=6)])) == [[3, 3, 0]]


def test_pack_takes_the_tightest_node_that_holds_the_job() -> None:
    running = [job(size=3), job(size=1)]
    case = make([4, 4, 4], [*running, job(size=1), job(size=3)], placed=[[3, 0, 0], [0, 1, 0], [0] * 3, [0] * 3])
    assert where("pack", case)[2:] == [[1, 0, 0], [0, 3, 0]]


def test_pack_serves_wide_workers_first() -> None:
    jobs = [job(size=1), job(size=1), job(size=1, width=4 * GPU)]
    assert where("pack", make([4, 2], jobs)) == [[0, 1], [0, 1], [1, 0]]
    assert where("fill", make([4, 2], jobs))[2] == [0, 0], "in order of arrival the wide worker finds no node"


def test_pack_does_not_strand_gpus_without_cpu() -> None:
    cpu_heavy = job(size=1, demand=(6000, 0, 0))
    case = make([4, 4], [job(size=1), cpu_heavy], placed=[[1, 0], [0, 0]], cpu_milli=[6000, 32000])
    assert where("pack", case)[1] == [0, 1], "the fuller node would have kept 2 GPUs and no CPU"


def test_fewest_nodes_brings_a_scattered_job_together() -> None:
    jobs = [job(size=3), job(size=2), job(size=4)]
    case = make([4, 4, 4], jobs, placed=[[1, 1, 1], [2, 0, 0], [0, 0, 0]])
    assert where("fewest-nodes", case) == [[0, 0, 3], [2, 0, 0], [0, 4, 0]]
    assert where("pack", case)[0] == [1, 1, 1], "pack never moves"


def test_fewest_nodes_leaves_a_job_alone_when_a_move_saves_no_node() -> None:
    case = make([4, 4, 4], [job(size=5)], placed=[[2, 3, 0]])
    assert where("fewest-nodes", case) == [[2, 3, 0]]


def test_a_growing_job_looks_at_its_own_nodes_first() -> None:
    for name in placement.BUILTIN:
        grown = make([8, 8, 8], [job(min_workers=1, max_workers=6)], placed=[[0, 2, 0]], want=[6])
        assert where(name, grown) == [[0, 6, 0]], name


def test_a_shrinking_job_gives_up_its_smallest_pieces() -> None:
    for name in placement.BUILTIN:
        shrunk = make([8, 8, 8], [job(min_workers=1, max_workers=9)], placed=[[1, 6, 2]], want=[7])
        assert where(name, shrunk) == [[0, 6, 1]] or name == "fewest-nodes", name
    assert where("fewest-nodes", shrunk) == [[0, 7, 0]]


def test_a_job_that_does_not_fit_in_full_gets_less_but_never_below_its_minimum() -> None:
    for name in placement.BUILTIN:
        assert sum(where(name, make([3], [job(min_workers=2, max_workers=8)], want=[8]))[0]) == 3, name
        assert sum(where(name, make([3], [job(min_workers=4, max_workers=8)], want=[8]))[0]) == 0, name


def test_a_running_job_that_fell_below_its_minimum_makes_way() -> None:
    jobs = [job(size=4), job(size=2)]
    for name in placement.BUILTIN:
        assert where(name, make([2, 0], jobs, placed=[[2, 0], [0, 0]])) == [[0, 0], [2, 0]], name


def test_fixed_roles_sit_on_the_first_node() -> None:
    case = make([2, 2], [job(size=3, fixed_milli=GPU), job(size=1)])
    for name in placement.BUILTIN:
        placed = where(name, case)
        assert sum(map(sum, placed)) == 3, f"{name}: three devices are left for workers"
        assert placed[0][0] <= 1


def test_fixed_roles_leave_with_their_job() -> None:
    jobs = [job(size=3, fixed_milli=GPU), job(size=3)]
    for name in placement.BUILTIN:
        assert where(name, make([3, 0], jobs, placed=[[2, 1], [0, 0]])) == [[0, 0], [3, 0]], name


def test_a_change_of_pool_takes_a_job_to_other_nodes() -> None:
    for name in placement.BUILTIN:
        case = make([4, 4], [job(size=2)], placed=[[2, 0]], pool=[0, 1])
        assert where(name, case._replace(pool=np.array([1]))) == [[0, 2]]


# Fewest moves.


def test_fewest_moves_clears_a_node_for_a_wide_worker() -> None:
    jobs = [job(size=1), job(size=1), job(size=1, width=4 * GPU)]
    case = make([4, 4], jobs, placed=[[1, 0], [0, 1], [0, 0]])
    placed = fewest_moves.place(*case)
    assert placed.sum() == 3
    assert moved(case.view.placed, placed) == 1
    assert where("pack", case)[2] == [0, 0], "without a move there is no room"


def test_nobody_moves_for_a_job_that_still_could_not_have_its_minimum() -> None:
    jobs = [job(size=1), job(size=1), job(size=2, width=4 * GPU)]
    case = make([4, 4], jobs, placed=[[1, 0], [0, 1], [0, 0]])
    assert where("fewest-moves", case) == [[1, 0], [0, 1], [0, 0]]


@given(case=cases(roles=False, demands=False, pools=1, widths=(GPU, 2 * GPU, 4 * GPU), max_nodes=3, max_jobs=4))
def test_fewest_moves_moves_nobody_when_everything_fits_as_it_is(case: Case) -> None:
    stays = placement.load("pack")(*case)
    placed = fewest_moves.place(*case)
    if (stays.sum(axis=1) == case.workers).all():
        assert np.array_equal(placed, stays)
    assert (placed.sum(axis=1) >= stays.sum(axis=1)).all(), "nobody loses workers so that others get some"


rows = st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=3, max_size=3)


@given(before=rows, fresh=rows)
def test_no_naming_of_the_nodes_moves_fewer(before: list[list[int]], fresh: list[list[int]]) -> None:
    """Every permutation of equal nodes, by brute force. The fourth node is of another kind and keeps its name."""
    case = make([8, 8, 8, 16], [job(min_workers=1, max_workers=8)] * 3, placed=before)
    anew = np.array(fresh)
    ours = fewest_moves.rename(case.view, Cells.of(case.view.placed), Cells.of(anew)).matrix(3, 4)
    kept = [np.minimum(anew[:, [*order, 3]], case.view.placed).sum() for order in permutations(range(3))]
    assert np.minimum(ours, case.view.placed).sum() == max(kept)
    assert np.array_equal(ours[:, 3], anew[:, 3])


@given(
    placed=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3),
    wide=st.integers(1, 2),
)
def test_fewest_moves_against_every_possible_placement(placed: list[tuple[int, int]], wide: int) -> None:
    """Tiny worlds: two nodes of 4, narrow jobs somewhere, wide newcomers. Nobody goes short who need not."""
    narrow = [job(size=sum(row)) for row in placed if sum(row)]
    rows = [row for row in placed if sum(row)]
    if sum(map(sum, rows)) > 8 or any(sum(column) > 4 for column in zip(*rows, strict=True)):
        return
    jobs = [*narrow, *[job(size=1, width=2 * GPU) for _ in range(wide)]]
    case = make([4, 4], jobs, placed=[*rows, *[(0, 0)] * wide])
    options = every_placement(case)
    ours = fewest_moves.place(*case)
    if options:
        assert np.array_equal(ours.sum(axis=1), case.workers)
        best = min(moved(case.view.placed, option) for option in options)
        assert moved(case.view.placed, ours) == best
    assert fewest_moves.moves(Cells.of(case.view.placed), Cells.of(ours)) == moved(case.view.placed, ours)


def test_a_packing_of_all_is_found_when_clearing_a_few_is_not_enough() -> None:
    """Nodes full of pairs that only fit when they change places: clearing one at a time is stuck."""
    jobs = [job(size=1, width=2 * GPU) for _ in range(3)] + [job(size=1, width=3 * GPU) for _ in range(2)]
    case = make([4, 4, 4], jobs, placed=[[1, 0, 0], [0, 1, 0], [0, 0, 1], [0] * 3, [0] * 3])
    placed = fewest_moves.place(*case)
    assert placed.sum() == 4
    assert placement.load("pack")(*case).sum() == 3


@pytest.mark.parametrize("name", sorted(placement.BUILTIN))
def test_many_different_shapes_are_counted_right(name: str) -> None:
    """More nodes change between two jobs of one shape than are refreshed one by one."""
    shapes = 200
    jobs = [job(size=1, demand=(1 + i % shapes, 0, 0)) for i in range(2 * shapes)]
    case = make([4] * 100, jobs, cpu_milli=[450] * 100)
    placed = placement.load(name)(*case)
    used = placed.T @ case.view.demand[:, 0]
    assert (used <= 450).all()
    assert (placed.sum(axis=0) <= 4).all()
    left_out = np.flatnonzero(placed.sum(axis=1) == 0)
    for j in left_out.tolist():
        assert not ((450 - used >= case.view.demand[j, 0]) & (placed.sum(axis=0) < 4)).any()
