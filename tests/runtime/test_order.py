"""The data order: every epoch has every sample once, whoever is a member, whenever; and it never changes."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.runtime.order import (
    Drawn,
    Loop,
    Order,
    OrderError,
    Turns,
    indices,
    micro,
    order_seed,
    owned,
    permutation,
    sample_seed,
    slices,
    virtual_slices,
)

loops = st.builds(
    Loop,
    samples=st.integers(1, 60),
    size=st.integers(1, 25),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)


@given(loops)
def test_each_epoch_has_every_sample_once_in_batches_of_the_size(loop: Loop) -> None:
    order = Order(loop)
    per_epoch = loop.steps_per_epoch
    for epoch in range(loop.epochs):
        batches = [order.indices(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert [len(batch) for batch in batches[:-1]] == [loop.size] * (per_epoch - 1)
        assert 1 <= len(batches[-1]) <= loop.size
        assert sorted(np.concatenate(batches).tolist()) == list(range(loop.samples))
    assert loop.total_steps == per_epoch * loop.epochs


@given(loops, st.data())
def test_any_history_of_members_feeds_every_sample_once_per_epoch(loop: Loop, data: st.DataObject) -> None:
    fed = np.zeros((loop.epochs, loop.samples), dtype=int)
    survivor = Order(loop)
    for step in range(loop.total_steps):
        members = data.draw(st.integers(1, 7))
        per_worker = data.draw(st.none() | st.integers(1, 6))
        order = data.draw(st.sampled_from([survivor, Order(loop)]))  # a newcomer starts from nothing
        batch = order.indices(step)
        for start, stop in slices(len(batch), members):
            for first, last in micro(start, stop, per_worker):
                fed[step // loop.steps_per_epoch, batch[first:last]] += 1
    assert (fed == 1).all()


@given(loops, st.data())
def test_a_batch_does_not_depend_on_what_was_asked_before(loop: Loop, data: st.DataObject) -> None:
    order = Order(loop)
    asked = data.draw(st.lists(st.integers(0, loop.total_steps - 1), min_size=1, max_size=8))
    for step in asked:
        assert order.indices(step).tolist() == indices(loop, step).tolist()
    assert len(order._epochs) <= 2


def test_a_batch_is_the_callers_own() -> None:
    order = Order(Loop(samples=10, size=10))
    order.indices(0)[:] = 0
    assert sorted(order.indices(0).tolist()) == list(range(10))


def test_drop_last_leaves_out_only_the_smaller_batch() -> None:
    loop = Loop(samples=10, size=4, epochs=2, seed=5, drop_last=True)
    whole = Loop(samples=10, size=4, epochs=2, seed=5)
    assert (loop.steps_per_epoch, whole.steps_per_epoch) == (2, 3)
    assert [indices(loop, step).tolist() for step in range(4)] == [
        indices(whole, step).tolist() for step in (0, 1, 3, 4)
    ]
    assert Loop(samples=8, size=4, drop_last=True).steps_per_epoch == 2


def test_a_dataset_shorter_than_a_batch_is_one_smaller_batch() -> None:
    loop = Loop(samples=3, size=8, epochs=2)
    assert loop.total_steps == 2
    assert sorted(indices(loop, 1).tolist()) == [0, 1, 2]


def test_the_order_never_changes() -> None:
    """Frozen: another value here would make resumed jobs read samples twice."""
    assert permutation(12, 0, 0).tolist() == [0, 2, 11, 9, 1, 8, 5, 4, 3, 10, 6, 7]
    assert permutation(12, 2**64 - 1, 7).tolist() == [3, 0, 7, 10, 4, 6, 9, 8, 1, 11, 5, 2]
    assert [sample_seed(0, 0, 0), sample_seed(1, 2, 3)] == [8010594611326568526, 3769214867257553265]


def test_the_order_is_the_stable_order_of_the_raw_stream() -> None:
    """Against the obvious slow version: sort (high bits, index) pairs in Python."""
    for samples in (1, 2, 3, 64, 1000, 1025):
        raw = np.random.Philox(key=np.array([9, 4], dtype=np.uint64)).random_raw(samples)
        low = (samples - 1).bit_length()
        pairs = sorted((int(key) >> low, index) for index, key in enumerate(raw))
        assert permutation(samples, 9, 4).tolist() == [index for _, index in pairs]


def test_epochs_and_seeds_differ_and_are_uniform() -> None:
    assert permutation(100, 0, 0).tolist() != permutation(100, 0, 1).tolist()
    assert permutation(100, 0, 0).tolist() != permutation(100, 1, 0).tolist()
    # Where sample 0 lands among 5 places: chi-squared with 4 degrees of freedom, far out of reach of a fair order.
    places = np.array([permutation(5, seed, 0).tolist().index(0) for seed in range(2000)])
    assert ((np.bincount(places, minlength=5) - 400) ** 2 / 400).sum() < 25


def test_without_shuffling_samples_come_as_they_are() -> None:
    loop = Loop(samples=7, size=3, epochs=2, shuffle=False)
    assert [indices(loop, step).tolist() for step in range(6)] == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_threads_may_share_an_order() -> None:
    loop = Loop(samples=2000, size=100, epochs=4, seed=3)
    wanted = [indices(loop, step).tolist() for step in range(loop.total_steps)]
    order, wrong = Order(loop), []

    def read(steps: list[int]) -> None:
        wrong.extend(step for step in steps if order.indices(step).tolist() != wanted[step])

    steps = list(range(loop.total_steps))
    threads = [threading.Thread(target=read, args=(part,)) for part in (steps, steps[::-1], steps[1::2])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@given(st.integers(0, 200), st.integers(1, 40))
def test_slices_cover_and_differ_by_at_most_one(count: int, members: int) -> None:
    cut = slices(count, members)
    assert len(cut) == members
    assert [index for start, stop in cut for index in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in cut]
    assert max(sizes) - min(sizes) <= 1
    assert virtual_slices(count, members) == cut


@given(st.integers(1, 64), st.integers(1, 80))
def test_every_virtual_rank_has_one_owner(virtual_ranks: int, members: int) -> None:
    ranks = owned(virtual_ranks, members)
    assert [rank for part in ranks for rank in part] == list(range(virtual_ranks))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 70))
def test_micro_batches_are_the_fewest_within_the_bound(start: int, count: int, per_worker: int) -> None:
    parts = micro(start, start + count, per_worker)
    assert [index for first, last in parts for index in range(first, last)] == list(range(start, start + count))
    sizes = [last - first for first, last in parts] or [0]
    assert max(sizes) <= per_worker
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-count // per_worker)


def test_without_a_bound_a_slice_is_one_micro_batch() -> None:
    assert micro(3, 9, None) == [(3, 9)]
    assert micro(3, 3, None) == []


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"samples": 0, "size": 4}, "no samples"),
        ({"samples": 10, "size": 0}, "size must be at least 1"),
        ({"samples": 10, "size": 4, "epochs": 0}, "0 epochs"),
        ({"samples": 10, "size": 4, "seed": -1}, "seed -1"),
        ({"samples": 10, "size": 4, "seed": 2**64}, "out of range"),
        ({"samples": 3, "size": 8, "drop_last": True}, "3 samples and the global batch 8"),
    ],
)
def test_a_loop_that_cannot_be_says_what_to_change(given_: dict[str, int], says: str) -> None:
    with pytest.raises(OrderError, match=says):
        Loop(**given_)


def test_cuts_that_cannot_be_are_refused() -> None:
    loop = Loop(samples=10, size=5)
    for step in (-1, 2):
        with pytest.raises(OrderError, match="steps 0 to 1"):
            indices(loop, step)
    with pytest.raises(OrderError, match="for 0 members"):
        slices(4, 0)
    with pytest.raises(OrderError, match="0 virtual ranks"):
        virtual_slices(4, 0)
    with pytest.raises(OrderError, match="per_worker=0"):
        micro(0, 4, 0)


def test_sample_seeds_differ_and_fit_in_a_signed_integer() -> None:
    seeds = {sample_seed(s, e, i) for s in (0, 1, 2**64 - 1) for e in range(5) for i in range(200)}
    assert len(seeds) == 3 * 5 * 200
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


epochs_of_batches = st.lists(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=6), min_size=1, max_size=5
)


@given(epochs_of_batches, st.integers(1, 3), st.data())
def test_drawn_batches_are_those_that_were_given(
    given_: list[list[list[int]]], accumulate: int, data: st.DataObject
) -> None:
    """Whichever step is asked for first, and whatever is known of later ones."""
    loop = Drawn(lambda epoch: given_[epoch], samples=10, epochs=len(given_), accumulate=accumulate)
    steps = [
        (epoch, batches[first : first + accumulate])
        for epoch, batches in enumerate(given_)
        for first in range(0, len(batches), accumulate)
    ]
    order = Order(loop)
    for step in data.draw(st.lists(st.integers(0, len(steps) - 1), min_size=1, max_size=8)):
        epoch, batches = steps[step]
        assert loop.has(step)
        assert loop.total_steps > step
        assert loop.epoch(step) == epoch
        assert order.indices(step).tolist() == [index for batch in batches for index in batch]
        assert [order.samples(step, *span) for span in loop.batches(step)] == batches
    assert not loop.has(len(steps))
    assert loop.total_steps == len(steps)
    with pytest.raises(OrderError, match=f"it has steps 0 to {len(steps) - 1}"):
        loop.epoch(len(steps))


@given(loops.filter(lambda loop: loop.shuffle), st.booleans(), st.integers(1, 3))
def test_a_drawn_permutation_is_cut_like_our_own(loop: Loop, fixed: bool, accumulate: int) -> None:
    size = -(-loop.size // accumulate)
    ours = Loop(samples=loop.samples, size=size * accumulate, epochs=loop.epochs, seed=loop.seed)
    drawn = Drawn(
        lambda epoch: permutation(loop.samples, loop.seed, epoch),
        samples=loop.samples,
        batch=size,
        epochs=loop.epochs,
        accumulate=accumulate,
        length=loop.samples if fixed else None,
    )
    order, other = Order(ours), Order(drawn)
    assert drawn.has(ours.total_steps - 1)
    assert drawn.total_steps == ours.total_steps
    for step in range(ours.total_steps):
        assert (drawn.span(step), drawn.epoch(step)) == (ours.span(step), ours.epoch(step))
        assert other.indices(step).tolist() == order.indices(step).tolist()


def test_each_epoch_is_drawn_once_and_in_order() -> None:
    """So that whoever counts its calls gives the same in every process."""
    calls: list[int] = []

    def draw(epoch: int) -> list[int]:
        calls.append(epoch)
        return list(range(len(calls)))

    loop = Drawn(draw, samples=9, batch=2, epochs=5)
    assert [loop.epoch(step) for step in (5, 0, 3, 8)] == [3, 0, 2, 4]
    assert calls == [0, 1, 2, 3, 4]


def test_steps_without_samples_have_seeds_of_their_own() -> None:
    loop = Turns(total_steps=3, seed=7)
    assert [loop.has(step) for step in (0, 2, 3)] == [True, True, False]
    assert len({loop.turn_seed(step, place) for step in range(3) for place in range(4)}) == 12
    assert loop.turn_seed(1, 2) == sample_seed(7, 1, 2)


def test_the_seed_of_an_order_never_changes() -> None:
    assert order_seed(3, 1) == 4697812382471903040
