"""Samples are the same whoever reads them, and reading them disturbs nobody."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import stretto.torch as stretto
from stretto.torch import sampling
from stretto.torch.data import Batch, Part, Reader, Turn


class Noisy(Dataset[tuple[float, float, float]]):
    """Augmented with all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[float, float, float]:
        return index + random.random(), float(np.random.rand()), float(torch.rand(()))


def read(parts: list[Part], workers: int = 0) -> dict[tuple[int, int], tuple[float, ...]]:
    reader = Reader(Noisy(), seed=5, workers=workers)
    reader.follow(lambda: iter(parts))
    found = {}
    for part in parts:
        batch = reader.read(part)
        assert batch.indices == part.indices
        for place, index in enumerate(batch.indices):
            found[(part.epoch, index)] = tuple(float(column[place]) for column in batch)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_depends_on_epoch_and_index_alone(workers: int) -> None:
    whole = read([Part(0, 0, tuple(range(20))), Part(1, 1, tuple(range(20)))])
    cut = read([Part(1, 1, (3, 4, 5)), Part(0, 0, (19, 3)), Part(0, 0, (7,))], workers)
    assert {key: whole[key] for key in cut} == cut
    assert whole[(0, 3)] != whole[(1, 3)]


def test_reading_leaves_the_generators_alone() -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = drawn()
    seed()
    read([Part(0, 0, (1, 2, 3))])
    assert drawn() == expected


def test_what_was_read_ahead_is_cut_again() -> None:
    reader = Reader(Noisy(), seed=5, workers=1)
    reader.follow(lambda: iter([Part(0, step, (step, step + 1)) for step in range(8)]))
    reader.read(Part(0, 0, (0, 1)))
    reader.follow(lambda: iter([Part(0, step, (step,)) for step in range(1, 8)]))
    assert reader.read(Part(0, 1, (1,))).indices == (1,)


class Telling(Dataset[str]):
    """Says in which kind of process it is read; waits for somebody who writes to the pipe if there is one."""

    def __init__(self, pipe: Path | None = None) -> None:
        self.pipe = pipe

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> str:
        if self.pipe is not None and self.pipe.exists():
            self.pipe.read_text()
        return type(multiprocessing.current_process()).__name__


def from_loader(loader: DataLoader[Any]) -> Reader:
    job = SimpleNamespace(workers=None, pin_memory=None, collate=None, sampler=None, batch_sampler=None, shuffle=None)
    found = sampling.source(loader, size=None, drop_last=False, **vars(job))
    reader = Reader(found.dataset, 5, **found.reading)
    reader.follow(lambda: iter([Part(0, 0, (3,))]))
    return reader


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_readers_are_started_as_the_loader_says(context: str) -> None:
    reader = from_loader(DataLoader(Telling(), 4, num_workers=1, multiprocessing_context=context))
    assert reader.read(Part(0, 0, (3,))).data == [f"{context.capitalize()}Process"]


def test_readers_of_the_first_process_of_a_container_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert read([Part(0, 0, (1, 2))], workers=1) == read([Part(0, 0, (1, 2))])


def test_a_reader_that_does_not_answer_in_the_time_of_its_loader_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = from_loader(DataLoader(Telling(pipe), 4, num_workers=1, timeout=0.1))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.1 seconds"):
        reader.read(Part(0, 0, (3,)))
    with pipe.open("wb"):
        pipe.unlink()


class Keeping(Dataset[Any]):
    """Augmented with a generator that it keeps, or with one that nobody can find."""

    def __init__(self, rng: Any, *, hidden: bool = False, used: bool = True) -> None:
        self.draw = rng.random if hidden else None
        self.parts = SimpleNamespace(transforms=[SimpleNamespace(rng=None if hidden else rng)])
        self.used = used

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = 0.0
        if self.used:
            drawn = float(self.draw() if self.draw is not None else self.parts.transforms[0].rng.random())
        return {"x": [torch.tensor(float(index)), drawn > 2.0], "noise": drawn if self.draw is not None else 0.0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("rng", [np.random.default_rng(0), random.Random(0), np.random.RandomState(0)])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_dataset_with_a_generator_of_its_own_is_refused(workers: int, rng: Any, hidden: bool) -> None:
    """Where it is found its position tells, else the samples do."""
    reader = Reader(Keeping(rng, hidden=hidden), seed=5, workers=workers)
    part = Part(2, 0, (7, 8))
    reader.follow(lambda: iter([part]))
    with pytest.raises(stretto.TrainingError, match="sample 7 of epoch 2 is another when it is read again"):
        reader.read(part)


def test_a_generator_that_is_not_used_while_reading_does_no_harm() -> None:
    part = Part(0, 0, (7, 8))
    reader = Reader(Keeping(np.random.default_rng(0), used=False), seed=5)
    assert reader.read(part)["x"][0].tolist() == [7.0, 8.0]


class Nans(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float("nan")), np.array([np.nan, index]), float("nan"), "text", torch.tensor([True])


def test_missing_values_are_equal_to_themselves() -> None:
    assert len(Reader(Nans(), seed=0).read(Part(0, 0, (0, 1)))) == 2


def test_a_batch_of_dictionaries_is_a_mapping() -> None:
    data = {"x": torch.ones(2), "label": torch.zeros(2), "step": torch.ones(2)}
    batch = Batch(data, (3, 4), 0, 9)
    assert {**batch} == data
    assert list(batch) == list(data), "unpacks as ever"
    assert batch["label"] is batch.label is data["label"]
    assert batch.x is data["x"]
    assert (batch.step, len(batch), "label" in batch, "other" in batch) == (9, 2, True, False)
    assert (next(iter(batch.values())), dict(batch.items()), batch.get("other", 5)) == (data["x"], data, 5)
    with pytest.raises(AttributeError, match="no 'other'; its samples have x, label, step"):
        _ = batch.other
    with pytest.raises(KeyError):
        _ = batch["other"]


def test_a_batch_of_pairs_is_a_sequence() -> None:
    batch = Batch([torch.ones(2), torch.zeros(2)], (3, 4), 0, 9)
    x, y = batch
    assert x is batch.x is batch[0]
    assert y is batch.y is batch[-1]
    with pytest.raises(TypeError, match="are no dictionaries but collate to a list"):
        _ = {**batch}
    with pytest.raises(AttributeError, match="a batch has no 'label'"):
        _ = batch.label


def test_fields_of_named_tuples_and_of_objects() -> None:
    pair = namedtuple("pair", "image label")
    assert Batch(pair(1, 2), (0,), 0, 0).label == 2
    assert Batch(SimpleNamespace(edges=3), (0,), 0, 0).edges == 3


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_moves_with_all_that_is_in_it(last: bool) -> None:
    pair = namedtuple("pair", "a b")
    batch = Batch({"x": [torch.ones(2)], "p": pair(torch.ones(1), "text"), "n": 3}, (3, 4), 1, 9)
    batch.last = last
    moved = batch.to(torch.float64)
    assert moved["x"][0].dtype == moved.p.a.dtype == torch.float64
    assert (moved.p.b, moved["n"]) == ("text", 3)
    assert (moved.indices, moved.epoch, moved.step, moved.last) == ((3, 4), 1, 9, last)
    assert batch["x"][0].dtype == torch.float32


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[stretto.Job]:
    """A world of one."""
    from stretto.torch import joining

    monkeypatch.setattr(joining, "_joined", None)
    yield stretto.join()
    monkeypatch.setattr(joining, "_joined", None)


def trained(job: stretto.Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = job.model(torch.nn.Linear(1, 1))
    return model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_last_pass_of_a_step_is_told(job: stretto.Job) -> None:
    model, optimizer = trained(job)
    told = []
    data = torch.utils.data.TensorDataset(torch.ones(7, 1))
    for batch in job.batches(data, size=5, per_worker=2):
        before = model.weight.clone()
        model(batch.x).mean().backward()
        optimizer.step()
        told.append((batch.step, batch.last))
        assert batch.last == (not torch.equal(before, model.weight))
    assert told == [(0, False), (0, False), (0, True), (1, True)]


def test_steps_of_a_world_of_one(job: stretto.Job) -> None:
    model, optimizer = trained(job)
    turns: list[Turn] = []
    for turn in job.steps(4, seed=2):
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        turns.append(turn)
    assert [(turn.step, turn.place, turn.places, turn.last) for turn in turns] == [(i, 0, 1, True) for i in range(4)]
    assert len({turn.seed for turn in turns}) == 4
    again = next(iter(job.steps(1, seed=2)))
    assert (again.seed, job.step) == (turns[0].seed, 4)
    with pytest.raises(ValueError, match="there must be at least 1"):
        job.steps(0)


def test_data_is_told_apart_whatever_it_is_made_of() -> None:
    """By numbers, words and shapes; not by where files are, nor by the last digits."""
    samples: list[Any] = [
        torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool), torch.ones(3) * 2j, 7, 7.5,
        "a word", {"ids": [1, 2], "mask": torch.tensor([True, False])}, (torch.eye(2).to_sparse(), 3), b"bytes", None,
    ]  # fmt: skip

    def sign(*data: Any) -> int:
        return Reader(list(data), 0).sign([(0, place) for place in range(len(data))])  # type: ignore[arg-type]

    assert sign(*samples) == sign(*samples)
    assert sign([1, 2]) != sign([2, 1])
    assert sign(torch.ones(3)) != sign(torch.ones(3) * 1.1)
    assert sign(torch.ones(3)) == sign(torch.ones(3) * (1 + 1e-7))
    assert sign("/here/one.png") == sign("/there/one.png")
