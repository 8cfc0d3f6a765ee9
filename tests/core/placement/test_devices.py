"""Seats on devices: nobody is turned out without need, nothing is promised twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_cases import Case, cases, faults, make, with_placed
from strategies import job
from stretto.core import placement
from stretto.core.placement.devices import Seat, assign
from stretto.core.placement.sharing import Share, pack
from stretto.core.snapshot import GPU
from stretto.errors import PolicyError


def check(case: Case, placed: np.ndarray, seats: tuple[Seat, ...]) -> None:
    """Every worker has a seat of its width, and no device is promised twice."""
    left = {
        (node, device): [GPU, int(case.view.nodes.gpu_memory_mib[node])]
        for node, count in enumerate(case.view.nodes.devices.tolist())
        for device in range(count)
    }
    for seat in seats:
        for device in seat.devices:
            room = left[seat.node, device]
            room[0] -= seat.milli
            room[1] -= seat.mib
            assert min(room) >= 0, f"device {device} of node {seat.node} is promised twice"
        assert len(set(seat.devices)) == len(seat.devices)
    for j, number in enumerate(case.view.job.tolist()):
        mine = [seat for seat in seats if seat.job == number and not seat.role]
        assert np.array_equal(np.bincount([seat.node for seat in mine], minlength=placed.shape[1]), placed[j])
        width = int(case.view.width[j])
        for seat in mine:
            assert len(seat.devices) == (-(-width // GPU) if width >= GPU else int(width > 0 or seat.mib > 0))
            assert seat.milli == (GPU if width >= GPU else width)
        roles = [seat for seat in seats if seat.job == number and seat.role]
        assert len(roles) == int(case.view.fixed_milli[j] > 0 and placed[j].any())


@given(case=cases(), name=st.sampled_from(sorted(placement.BUILTIN)))
def test_every_placed_worker_has_a_seat(case: Case, name: str) -> None:
    placed = placement.load(name)(*case)
    seats = assign(case.view, placed, case.pool)
    check(case, placed, seats)
    assert assign(case.view, placed, case.pool) == seats
    assert assign(case.view, placed, case.pool, seats) == seats, "who has a seat keeps it"


@given(case=cases(roles=False))
def test_seats_stay_while_others_come_and_go(case: Case) -> None:
    before = case.view.placed
    now = case._replace(pool=np.maximum(case.view.pool, 0))
    held = assign(now.view, before, now.pool)
    placed = placement.load("pack")(*now)
    seats = assign(now.view, placed, now.pool, held)
    check(now, placed, seats)


def test_leavers_make_room_and_the_others_keep_their_devices() -> None:
    case = make([4], [job(size=1), job(size=1), job(size=2)])
    held = assign(case.view, np.array([[1], [1], [2]]), case.pool)
    assert [seat.devices for seat in held] == [(0,), (1,), (2,), (3,)]
    after = assign(case.view, np.array([[0], [1], [2]]), case.pool, held)
    assert [seat.devices for seat in after] == [(1,), (2,), (3,)]
    assert assign(case.view, np.array([[1], [1], [2]]), case.pool, after)[0].devices == (0,)


def test_shares_go_to_the_fullest_device() -> None:
    jobs = [job(size=1, width=500), job(size=1, width=250), job(size=1), job(size=1, width=250)]
    case = make([2], jobs)
    seats = assign(case.view, np.ones((4, 1), np.int64), case.pool)
    assert {seat.job: seat.devices for seat in seats} == {0: (1,), 1: (1,), 2: (0,), 3: (1,)}


def test_gpu_memory_limits_sharing_too() -> None:
    jobs = [job(size=1, width=100, demand=(0, 0, 10)) for _ in range(3)]
    case = make([2], jobs, gpu_memory_mib=[20])
    placed = placement.load("pack")(*case)
    assert placed.sum() == 3
    seats = assign(case.view, placed, case.pool)
    assert [seat.devices for seat in seats] == [(0,), (0,), (1,)]
    assert placement.load("pack")(*make([1], jobs, gpu_memory_mib=[20])).sum() == 2


def test_a_share_by_memory_alone_takes_a_device_too() -> None:
    jobs = [job(size=1, width=0, demand=(0, 0, 12)), job(size=1)]
    case = make([1], jobs, gpu_memory_mib=[16])
    assert placement.load("fill")(*case).tolist() == [[1], [0]]


def test_a_worker_without_a_gpu_needs_no_device() -> None:
    case = make([1], [job(size=3, width=0, demand=(1000, 0, 0)), job(size=1)], cpu_milli=[4000])
    placed = placement.load("pack")(*case)
    assert placed.tolist() == [[3], [1]]
    assert [seat.devices for seat in assign(case.view, placed, case.pool)] == [(), (), (), (0,)]


def test_a_node_is_dealt_out_afresh_only_when_a_newcomer_finds_no_seat() -> None:
    jobs = [job(size=1, width=600), job(size=1, width=400), job(size=1, width=500), job(size=1, width=500)]
    case = make([2], jobs)
    scattered = (Seat(0, 0, False, (0,), 600, 0), Seat(0, 1, False, (1,), 400, 0))
    one = assign(case.view, np.array([[1], [1], [1], [0]]), case.pool, scattered)
    assert {seat.job: seat.devices for seat in one} == {0: (0,), 1: (1,), 2: (1,)}
    both = assign(case.view, np.ones((4, 1), np.int64), case.pool, one)
    check(case, np.ones((4, 1), np.int64), both)


def test_what_does_not_fit_is_an_error_that_names_the_node() -> None:
    case = make([1], [job(size=2)])
    with pytest.raises(PolicyError, match="'node-0' do not fit its 1 devices"):
        assign(case.view, np.array([[2]]), case.pool)


# Packing of shares.

shares = st.dictionaries(
    st.builds(Share, st.sampled_from([110, 160, 230, 333, 340, 500, 510, 700]), st.sampled_from([0, 2, 5, 9])),
    st.integers(1, 3),
    max_size=4,
)


@given(shares=shares, limit=st.integers(0, 4))
def test_packing_is_right_and_misses_nothing(shares: dict[Share, int], limit: int) -> None:
    """Against a search through all packings."""
    packed = pack(shares, limit, 10)
    items = sorted((share for share, count in shares.items() for _ in range(count)), reverse=True)
    case = make([max(limit, 1)], [job(size=1, width=s.milli, demand=(0, 0, s.mib)) for s in items], gpu_memory_mib=[10])
    possible = not items or (limit > 0 and not faults(case.view, np.ones((len(items), 1), np.int64), case.pool))
    assert (packed is not None) == possible
    if packed is not None:
        bins, _ = packed
        assert len(bins.held) <= limit
        for milli, mib, held in zip(bins.milli, bins.mib, bins.held, strict=True):
            assert milli == GPU - sum(share.milli * count for share, count in held.items()) >= 0
            assert mib == 10 - sum(share.mib * count for share, count in held.items()) >= 0
        total = {s: sum(held.get(s, 0) for held in bins.held) for s in shares}
        assert total == shares


def test_the_search_finds_what_best_fit_misses() -> None:
    items = {Share(500, 0): 1, Share(400, 0): 1, Share(350, 0): 1, Share(250, 0): 3}
    packed = pack(items, 2, 10)
    assert packed is not None
    assert packed[1], "best fit decreasing needs three devices"


@given(case=cases(widths=(250, 333, 500, 700), roles=False, demands=False, pools=1, max_nodes=2))
def test_shares_never_lose_their_place_because_others_left(case: Case) -> None:
    placed = placement.load("pack")(*case)
    fewer = case.workers * (np.arange(len(case.workers)) % 2)
    again = placement.load("pack")(*with_placed(case, placed)._replace(workers=fewer))
    stay = (np.arange(len(fewer)) % 2 == 1) & (placed.sum(axis=1) > 0)
    assert (again[stay] >= placed[stay]).all()
