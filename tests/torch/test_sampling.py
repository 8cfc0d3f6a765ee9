"""Orders that samplers decide: the same on all workers, at any size and after any history, or one clear error."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stretto.backends.local.forkserver import ForkServer
from stretto.errors import StrettoError
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import AnyLoop, Drawn, Loop, Turns
from stretto.testing import Harness
from stretto.torch import plan as plans
from stretto.torch import sampling
from stretto.torch.plan import Plan

SCRIPTS = Path(__file__).parent / "scripts"
sys.path.append(str(SCRIPTS))
DATA = TensorDataset(torch.arange(40.0))
NOTHING: dict[str, Any] = {
    "size": None,
    "sampler": None,
    "batch_sampler": None,
    "shuffle": None,
    "drop_last": False,
    "workers": None,
    "pin_memory": None,
    "collate": None,
}


def source(given: Any = DATA, **options: Any) -> sampling.Source:
    return sampling.source(given, **{**NOTHING, **options})


def plan(given: Any = DATA, *, epochs: int = 2, seed: int = 3, accumulate: int = 1, **options: Any) -> Plan:
    return plans.make(
        source(given, **options),
        epochs=epochs,
        seed=seed,
        accumulate=accumulate,
        per_worker=None,
        virtual_ranks=0,
        weight=None,
    )


def batches(given: Plan) -> list[list[int]]:
    steps = itertools.takewhile(given.loop.has, itertools.count())
    return [given.order.indices(step).tolist() for step in steps]


class Own(Sampler[int]):
    """Draws from a generator that it keeps."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(40, generator=self.rng).tolist())
        order = list(range(40))
        self.rng.shuffle(order)
        return iter(order)


class Global(Sampler[int]):
    """Draws from each of the global generators."""

    def __iter__(self) -> Iterator[int]:
        yield from random.sample(range(40), 10)
        yield from np.random.permutation(40)[:10]
        yield from torch.randperm(40)[:10]


class Unsteady(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(40).tolist())


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 40, 30),
        SubsetRandomSampler(range(5, 35)),
        RandomSampler(DATA, replacement=True, num_samples=30, generator=torch.Generator()),
        Own(torch.Generator()),
        Own(np.random.default_rng(1)),
        Own(np.random.RandomState(1)),
        Own(random.Random(1)),
        Global(),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_an_order_depends_on_seed_and_epoch_alone(sampler: Any) -> None:
    torch.manual_seed(1)
    first = batches(plan(sampler=sampler, size=12))
    # Whatever was drawn before, by others and by itself.
    torch.manual_seed(2)
    random.random()
    list(sampler)
    second = plan(sampler=sampler, size=12)
    half = sum(map(len, first)) // 2
    assert batches(second) == first
    flat = list(itertools.chain(*first))
    assert flat[:half] != flat[half:], "every epoch has another order"
    assert batches(plan(sampler=sampler, size=12, seed=4)) != first


def test_drawing_leaves_the_generators_of_the_training_alone() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()
    batches(plan(sampler=Global(), size=12))
    assert drawn() == expected


class Epochs(Sampler[int]):
    """A curriculum: more in each epoch, as it is told."""

    def __init__(self) -> None:
        self.epoch, self.told = 0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * (self.epoch + 1)))


def test_epochs_of_different_lengths() -> None:
    made = plan(sampler=Epochs(), size=8, epochs=3)
    assert made.loop.total_steps == 2 * 3, "as far as is known"
    assert [len(batch) for batch in batches(made)] == [8, 2, 8, 8, 4, 8, 8, 8, 6]
    assert made.loop.total_steps == 9
    late = plan(sampler=Epochs(), size=8, epochs=3)
    assert late.loop.has(8), "who comes at the end draws what was before"
    assert not late.loop.has(9)
    assert late.order.indices(8).tolist() == [24, 25, 26, 27, 28, 29]


def test_a_loop_of_one_epoch_leaves_the_epoch_to_the_script() -> None:
    sampler = Epochs()
    sampler.set_epoch(2)
    assert len(batches(plan(sampler=sampler, size=10, epochs=1))) == 3
    assert sampler.told == [2]


def test_batches_of_different_sizes_are_cut_for_every_number_of_places() -> None:
    lists = [[3, 4, 5], [7], [1, 2, 0, 9, 8, 6, 11]]
    made = plan(batch_sampler=lists, epochs=2)
    assert batches(made) == lists * 2
    assert made.loop.size == 7
    for places in (1, 2, 5):
        for step in range(6):
            parts = [made.parts(step, place, places) for place in range(places)]
            fed = [index for some in parts for part in some if part.counts for index in part.indices]
            assert fed == lists[step % 3]
            assert sum(part.share for some in parts for part in some) == pytest.approx(1.0)


def test_accumulated_batches_of_different_sizes() -> None:
    lists = [[3, 4, 5], [7], [1, 2, 0, 9]]
    made = plan(batch_sampler=lists, epochs=1, accumulate=2)
    assert batches(made) == [[3, 4, 5, 7], [1, 2, 0, 9]]
    assert [made.batches(step) for step in (0, 1)] == [2, 1]
    assert [part.indices for part in made.parts(0, 0, 2)] == [(3, 4), (7,)]
    assert [part.share for part in made.parts(0, 0, 2)] == pytest.approx([2 / 3, 1.0])


def test_signs_tell_orders_apart() -> None:
    one, same, other = (plan(sampler=order, size=4) for order in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 5, 4]))
    assert [one.sign(step) for step in range(4)] == [same.sign(step) for step in range(4)]
    assert [one.sign(step) for step in range(4)] != [other.sign(step) for step in range(4)]
    assert "by list in epoch 1" in one.summary


def test_what_is_over_is_forgotten() -> None:
    made = plan(batch_sampler=[[1, 2], [3]], epochs=3)
    for step in range(6):
        made.sign(step)
        assert made.parts(step, 0, 1)
    assert isinstance(made.loop, Drawn)
    assert list(made.loop._held) == [2]


def test_a_loader_is_taken_apart() -> None:
    collate = list
    loader = DataLoader(DATA, 8, shuffle=True, drop_last=True, collate_fn=collate, pin_memory=False)
    found = source(loader)
    assert (found.dataset, found.size, found.order, found.shuffle, found.drop_last) == (DATA, 8, None, True, True)
    assert found.reading["collate"] is collate
    assert source(DataLoader(DATA, 8)).shuffle is False
    assert isinstance(plan(DataLoader(DATA, 8, shuffle=True)).loop, Loop), "as without a loader"
    weighted = WeightedRandomSampler([1.0] * 40, 16)
    assert source(DataLoader(DATA, 8, sampler=weighted)).order is weighted
    assert source(DataLoader(DATA, 8, sampler=weighted), size=8).size == 8
    pairs = [[0, 1], [2]]
    assert source(DataLoader(DATA, batch_sampler=pairs)).order == pairs
    inner = source(DataLoader(DATA, batch_sampler=BatchSampler(weighted, 5, drop_last=True)))
    assert (inner.order, inner.size, inner.drop_last) == (weighted, 5, True)
    assert source(DataLoader(DATA, 8, num_workers=2)).reading["workers"] == 2
    assert source(DataLoader(DATA, 8, num_workers=2), workers=0).reading["workers"] == 0


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (2 * batch for (batch,) in super().__iter__())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


REFUSED: dict[str, tuple[str, Any]] = {
    "distributed": ("slice of its own", lambda: plan(sampler=DistributedSampler(DATA, 2, 0), size=4)),
    "distributed inside": (
        "slice of its own",
        lambda: plan(batch_sampler=BatchSampler(DistributedSampler(DATA, 2, 0), 4, False)),
    ),
    "distributed in a loader": (
        "slice of its own",
        lambda: plan(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0))),
    ),
    "both": ("give one of them", lambda: plan(sampler=[1], batch_sampler=[[1]])),
    "shuffled": ("leave shuffle out", lambda: plan(sampler=[1], size=1, shuffle=True)),
    "two sizes": ("one global batch", lambda: plan(batch_sampler=[[1]], size=4)),
    "no size": ("give size=", lambda: plan(sampler=[1])),
    "no size at all": ("give size=", plan),
    "dropped": ("drop_last=True", lambda: plan(batch_sampler=[[1]], drop_last=True)),
    "a generator": ("for every epoch", lambda: plan(sampler=iter([1, 2]), size=1)),
    "another size": ("batch_size=8", lambda: plan(DataLoader(DATA, 8), size=4)),
    "another order": ("another order beside it", lambda: plan(DataLoader(DATA, 8), sampler=[1])),
    "a loader that does more": ("a Doubling has a way of its own", lambda: plan(Doubling(DATA, 8))),
    "no batches": ("makes no batches", lambda: plan(DataLoader(DATA, batch_size=None))),
    "a stream": ("streams are not supported yet", lambda: plan(Stream(), size=4)),
    "a stream in a loader": ("streams are not supported yet", lambda: plan(DataLoader(Stream(), 4))),
    "outside": ("the indices 0 to 39", lambda: batches(plan(sampler=[1, 40], size=1))),
    "negative": ("the indices 0 to 39", lambda: batches(plan(sampler=[1, -1], size=1))),
    "names": ("where the index of a sample was expected", lambda: batches(plan(sampler=["a"], size=1))),
    "batches as samples": ("pass it as batch_sampler=", lambda: batches(plan(sampler=[[1]], size=1))),
    "samples as batches": ("pass it as sampler=", lambda: batches(plan(batch_sampler=[1]))),
    "empty": ("they make no batch", lambda: batches(plan(sampler=[], size=1))),
    "an empty batch": ("a batch without samples", lambda: batches(plan(batch_sampler=[[1], []]))),
    "all dropped": ("they make no batch", lambda: batches(plan(sampler=[1, 2], size=4, drop_last=True))),
    "all dropped later": (
        "they make no batch",
        lambda: batches(plan(sampler=Own(random.Random()), size=50, drop_last=True)),
    ),
    "unsteady": ("gives another order when it is asked again", lambda: batches(plan(sampler=Unsteady(), size=4))),
    "bitwise": (
        "in bitwise mode",
        lambda: plans.make(
            source(batch_sampler=[[1]]), epochs=1, seed=0, accumulate=2, per_worker=None, virtual_ranks=4, weight=None
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    text, call = REFUSED[name]
    with pytest.raises((StrettoError, ValueError), match=text):
        call()


class InPlace(Sampler[int]):
    def __init__(self) -> None:
        self.order = list(range(40))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(self.order)


def test_history_within_a_loop_is_right_between_loops_it_is_refused() -> None:
    """A worker that comes in the second loop would not have it."""
    used, fresh = InPlace(), InPlace()
    expected = batches(plan(sampler=used, size=8, epochs=3))
    assert sorted(itertools.chain(*expected[:5])) == list(range(40))
    late = plan(sampler=fresh, size=8, epochs=3)
    assert late.order.indices(14).tolist() == expected[14]
    with pytest.raises(StrettoError, match="gives another order when it is asked again"):
        batches(plan(sampler=used, size=8))


def test_a_sampler_without_history_serves_many_loops() -> None:
    sampler = Global()
    first = batches(plan(sampler=sampler, size=8, epochs=1))
    for _ in range(3):
        assert batches(plan(sampler=sampler, size=8, epochs=1)) == first


def test_torchs_own_samplers_need_not_draw_what_was_before() -> None:
    calls = []
    sampler = WeightedRandomSampler([1.0] * 40, 16)
    made = plan(sampler=sampler, size=8, epochs=50)
    assert isinstance(made.loop, Drawn)
    draw = made.loop._draw
    made.loop._draw = lambda epoch: calls.append(epoch) or draw(epoch)  # type: ignore[func-returns-value]
    assert made.loop.total_steps == 100
    made.parts(99, 0, 1)
    assert calls == [49]


def test_sequential_samplers_of_something_else_are_kept() -> None:
    loader = DataLoader(DATA, 4, sampler=SequentialSampler(range(7)))
    assert batches(plan(loader, epochs=1)) == [[0, 1, 2, 3], [4, 5, 6]]


# Jobs on real processes.


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(folder: Path, warm: ForkServer, count: int, case: dict[str, Any]) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPTS / "sampled.py")],
        workers=count,
        min_workers=count,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    )


def compare(folder: Path, warm: ForkServer, case: dict[str, Any], loops: dict[int, AnyLoop]) -> None:
    """Plain PyTorch, one worker alone, and a job that grows from one worker to three and loses one."""
    right = chaos.reference(folder / "plain", {**case, "plain": True}, SCRIPTS / "sampled.py", warm)
    alone = chaos.reference(folder / "alone", case, SCRIPTS / "sampled.py", warm)
    assert alone["steps"] == right["steps"]
    np.testing.assert_allclose(alone["weights"], right["weights"], rtol=1e-9)
    with start(folder / "job", warm, 1, case) as harness:
        harness.wait_members(1)
        harness.wait_applied(5)
        harness.want(3)
        harness.wait(lambda: harness.over or len(harness.members()) == 3, "three of them")
        assert not harness.over, harness.describe()
        harness.worker(harness.members()[1]).kill()
        harness.want(2)
        harness.wait(lambda: harness.over or len(harness.members()) == 2, "two of them")
        assert not harness.over, harness.describe()
        (folder / "job" / "hurry").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()
        chaos.check_weights(folder / "job", {}, right)
        audit(ledger_files(folder / "job" / "ledger"), loops).check()


KINDS = [
    "weighted",
    "weighted, dropping",
    "subset",
    "list",
    "buckets",
    "buckets, accumulated",
    "curriculum",
    "in place",
    "batches",
    "loader",
]


@pytest.mark.parametrize("kind", KINDS)
def test_as_plain_pytorch_over_the_same_indices(tmp_path: Path, warm: ForkServer, kind: str) -> None:
    import sampled

    steps = sampled.drawn(kind)
    lists = [list(itertools.chain(*step)) for step in steps]
    loop = Drawn(lambda _: lists, samples=sampled.SAMPLES)
    compare(tmp_path, warm, {"kind": kind, "per_worker": 3 if kind == "buckets" else None}, {0: loop})


def test_steps_without_a_dataset(tmp_path: Path, warm: ForkServer) -> None:
    compare(tmp_path, warm, {"steps": 70}, {0: Turns(total_steps=70)})


def test_a_loop_for_each_epoch(tmp_path: Path, warm: ForkServer) -> None:
    """Who comes later has not been in the loops before."""
    import sampled

    sampler, loops = sampled.Buckets(), {}
    for epoch in range(sampled.EPOCHS):
        sampler.set_epoch(epoch)
        found = sampling.Draw(sampler, sampled.dataset, epoch, sets_epoch=False)(0)
        loops[epoch] = Drawn(dict(enumerate([found])).__getitem__, samples=sampled.SAMPLES)
    compare(tmp_path, warm, {"kind": "buckets", "epochwise": True}, loops)


@pytest.mark.parametrize("case", [{"kind": "buckets", "bitwise": True}, {"steps": 70, "bitwise": True}], ids=str)
def test_bits_do_not_depend_on_the_number_of_workers(tmp_path: Path, warm: ForkServer, case: dict[str, Any]) -> None:
    right = chaos.reference(tmp_path / "alone", case, SCRIPTS / "sampled.py", warm)
    with start(tmp_path / "job", warm, 3, case) as harness:
        harness.wait_members(3)
        harness.worker(harness.members()[1]).kill()
        harness.wait_members(2)
        (tmp_path / "job" / "hurry").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()
        chaos.check_weights(tmp_path / "job", case, right)


def test_all_are_killed(tmp_path: Path, warm: ForkServer) -> None:
    """Others go on from a checkpoint in the middle of a curriculum, whose earlier epochs they draw once more."""
    case = {"kind": "curriculum"}
    right = chaos.reference(tmp_path / "plain", {**case, "plain": True}, SCRIPTS / "sampled.py", warm)
    job = start(tmp_path / "job", warm, 2, case)
    job.environment["STRETTO_CHECKPOINT_S"] = "0.2"
    with job as harness:
        harness.wait(lambda: harness.over or _saved(tmp_path / "job") > 30, "a checkpoint of a later epoch")
        for worker in harness.workers:
            worker.kill()
        harness.launch(2)
        harness.wait(lambda: set(harness.members()) == {"w2", "w3"} or harness.over, "the others are there")
        formed = harness.last("formed")
        assert formed is not None
        assert formed["applied"] > 30, "it went on from the checkpoint"
        (tmp_path / "job" / "hurry").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()
        chaos.check_weights(tmp_path / "job", case, right)


def _saved(folder: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*")), default=0)


def test_samplers_that_differ_between_workers_end_the_job(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, {"kind": "differs"}) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "the workers of the job differ in loop 0" in end["reason"]
        assert "by Differs in epoch 0" in end["reason"]
