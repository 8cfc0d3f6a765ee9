"""Samples are the same whoever reads them, and reading them disturbs nobody."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stretto.torch.data import Part, Reader


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
