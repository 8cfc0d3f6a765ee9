"""One tree, whoever adds: every number of members and every assignment gives the bits of the recursive sum."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch_crew import Crew

from stretto.runtime.order import owned
from stretto.torch.bitwise import TreeSum, VirtualReducer, subtrees
from stretto.torch.groups import Group, Store, connect


class Room:
    """Members as threads of one process: what they gather is what they put on the table."""

    def __init__(self, size: int) -> None:
        self.table: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)


class Seat(Group):
    """A group without a network, for many small cases; the real one is tested below."""

    def __init__(self, room: Room, rank: int) -> None:
        super().__init__(1, rank, ["nowhere:0"] * len(room.table))
        self.room = room

    def all_gather_now(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.room.table[self.rank] = tensor
        self.room.barrier.wait()
        found = [one.clone() for one in self.room.table]
        self.room.barrier.wait()
        return found


def recursive(values: Sequence[torch.Tensor], level: int, position: int) -> torch.Tensor:
    """The definition."""
    if level == 0:
        return values[position]
    left = recursive(values, level - 1, 2 * position)
    if (2 * position + 1) << (level - 1) >= len(values):
        return left
    return left + recursive(values, level - 1, 2 * position + 1)


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def leaves(ranks: int, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Huge and tiny values, but those that are added differ by a few orders only: another order of additions shows."""
    made = np.random.default_rng(seed)
    scale = 10.0 ** made.integers(-30, 30, 37)
    values = made.standard_normal((ranks, 37)) * scale * 10.0 ** made.integers(-2, 3, (ranks, 37))
    return [torch.from_numpy(row).to(dtype) for row in values]


def added(ranks: int, cuts: Sequence[range], values: list[torch.Tensor], chunk_mib: float) -> list[bytes]:
    """Each member's sum."""
    room = Room(len(cuts))
    results: list[bytes] = [b""] * len(cuts)

    def member(rank: int) -> None:
        group = Seat(room, rank) if len(cuts) > 1 else None
        tree = TreeSum(ranks, [values[0], values[0][:5]])
        for virtual in cuts[rank]:
            tree.add(virtual, [values[virtual], values[virtual][:5]])
        whole, part = tree.total(group, cuts, chunk_mib=chunk_mib)
        assert whole is not None
        assert part is not None
        assert bits(part) == bits(whole[:5])
        results[rank] = bits(whole)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 16),
    data=st.data(),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    chunk_mib=st.sampled_from([1e-5, 25.0]),
)
def test_any_contiguous_assignment_gives_the_same_bits(
    ranks: int, data: st.DataObject, seed: int, dtype: torch.dtype, chunk_mib: float
) -> None:
    values = leaves(ranks, seed, dtype)
    expected = bits(recursive(values, (ranks - 1).bit_length(), 0))
    cuts = sorted(data.draw(st.lists(st.integers(0, ranks), max_size=ranks + 1)))
    edges = [0, *cuts, ranks]
    assignment = [range(begin, end) for begin, end in itertools.pairwise(edges)]
    assert set(added(ranks, assignment, values, chunk_mib)) == {expected}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 12, 16])
def test_every_number_of_members_gives_the_same_bits(ranks: int) -> None:
    values = leaves(ranks, ranks, torch.float32)
    found = {one for members in range(1, ranks + 1) for one in added(ranks, owned(ranks, members), values, 25.0)}
    assert found == {bits(recursive(values, (ranks - 1).bit_length(), 0))}


def test_another_order_would_show() -> None:
    values = leaves(8, 3, torch.float32)
    plain = values[0]
    for value in values[1:]:
        plain = plain + value
    assert bits(plain) != bits(recursive(values, 3, 0))


def test_subtrees_are_the_largest_aligned_ones() -> None:
    assert subtrees(range(8)) == [(3, 0)]
    assert subtrees(range(1, 8)) == [(0, 1), (1, 1), (2, 1)]
    assert subtrees(range(3, 6)) == [(0, 3), (1, 2)]
    assert subtrees(range(5, 5)) == []


def test_the_memory_is_as_stated() -> None:
    for ranks in range(1, 65):
        for begin in range(ranks):
            most = max(len(subtrees(range(begin, end))) for end in range(begin + 1, ranks + 1))
            assert most <= 2 * max(1, (ranks - 1).bit_length())


def test_counters_are_taken_not_added_and_means_are_divided() -> None:
    tree = TreeSum(3, [torch.zeros(1), torch.tensor(0)])
    for rank, value in enumerate((1.0, 2.0, 6.0)):
        tree.add(rank, [torch.tensor([value]), torch.tensor(7 + rank)])
    mean, counter = tree.mean(None, [range(3)])
    assert mean is not None
    assert counter is not None
    assert (float(mean), int(counter)) == (3.0, 7)


def test_values_nobody_has_stay_none() -> None:
    tree = TreeSum(2, [torch.zeros(1), torch.zeros(1)])
    tree.add(0, [None, torch.ones(1)], 0.5)
    tree.add(1, [None, None], 0.5)
    nothing, half = tree.total(None, [range(2)])
    assert nothing is None
    assert half is not None
    assert float(half) == 0.5


def test_a_gap_and_a_wrong_assignment_are_refused() -> None:
    tree = TreeSum(4, [torch.zeros(1)])
    tree.add(0, [torch.ones(1)])
    with pytest.raises(ValueError, match="does not follow"):
        tree.add(2, [torch.ones(1)])
    with pytest.raises(ValueError, match="other virtual ranks"):
        tree.total(None, [range(4)])
    with pytest.raises(ValueError, match="do not share out"):
        tree.total(None, [range(3)])


# Real processes and real gradients.


def host(kept: SimpleNamespace, _rank: int) -> str:
    kept.store = Store()
    return str(kept.store.address)


def join(kept: SimpleNamespace, rank: int, generation: int, addresses: list[str]) -> None:
    kept.group = connect(generation, rank, addresses, timeout_s=30)


def train(group: Group | None, rank: int, ranks: int) -> tuple[bytes, float]:
    """Three steps with dropout seeded by virtual rank and two backward passes each; the bits of the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
    unused = nn.Parameter(torch.zeros(2))
    x, y = torch.randn(24, 6), torch.randn(24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = VirtualReducer([*model.parameters(), unused], ranks)
    assignment = owned(ranks, group.size if group is not None else 1)
    size = 24 // ranks
    for step in range(3):
        optimizer.zero_grad()
        reducer.exchange(group, assignment, (1.0,))
        for virtual in assignment[rank]:
            rows = slice(virtual * size, (virtual + 1) * size)
            reducer.begin(virtual, size / 24)
            torch.manual_seed(1000 * step + virtual)
            F.mse_loss(model(x[rows]), y[rows]).backward()
            (model(x[rows]) ** 2).mean().backward()
        if not len(assignment[rank]):
            reducer.contribute_nothing()
            reducer.contribute_nothing()
        assert reducer.failed is None
        assert reducer.rounds == 2
        optimizer.step()
    assert unused.grad is None
    return b"".join(bits(p.detach()) for p in model.parameters()), float(reducer.flags[0])


def train_in_group(kept: SimpleNamespace, rank: int, ranks: int) -> tuple[bytes, float]:
    return train(kept.group, rank, ranks)


def test_training_has_the_same_bits_on_one_two_and_three_members() -> None:
    torch.set_num_threads(1)
    expected = {ranks: train(None, 0, ranks)[0] for ranks in (2, 4, 6)}
    with Crew(3) as crew:
        addresses = crew.call(host)
        for members in (2, 3):
            chosen = list(range(members))
            crew.call(join, members, addresses[:members], ranks=chosen)
            for ranks, weights in expected.items():
                assert crew.call(train_in_group, ranks, ranks=chosen) == [(weights, float(members))] * members


def lose(kept: SimpleNamespace, rank: int) -> tuple[bool, bool]:
    model = nn.Linear(6, 3)
    reducer = VirtualReducer(model.parameters(), 4)
    for _ in range(100_000):
        reducer.exchange(kept.group, owned(4, 3))
        for virtual in owned(4, 3)[rank]:
            reducer.begin(virtual, 0.25)
            model(torch.ones(1, 6)).sum().backward()
        if reducer.failed is not None:
            return True, all(p.grad is not None for p in model.parameters())
    return False, False


def test_a_lost_peer_does_not_raise() -> None:
    with Crew(3) as crew:
        addresses = crew.call(host)
        crew.call(join, 1, addresses)
        crew.start(lose)
        crew[2].kill()
        assert [crew[rank].result() for rank in (0, 1)] == [(True, True)] * 2
