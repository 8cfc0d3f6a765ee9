"""Orders that samplers decide, and steps without a dataset; compared with plain PyTorch over the same indices.

With "plain" in CASE there is no job at all: the training written out by hand, over the batches that `drawn` gives.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import stretto.torch as stretto
from stretto.runtime.order import order_seed, sample_seed

CASE = json.loads(os.environ.get("CASE", "{}"))
SAMPLES, SIZE, EPOCHS, SEED = 90, 12, 9, 4
WORKER = os.environ.get("STRETTO_WORKER", "alone")

generator = torch.Generator().manual_seed(1)
x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
y = x.sum(1, keepdim=True).sin()
lengths = torch.randint(1, 9, (SAMPLES,), generator=generator).tolist()


class Buckets(Sampler[list[int]]):
    """Samples of about one length together: batches of different sizes, more or fewer of them in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(SAMPLES), key=lambda index: (lengths[index], random.random()))
        batches, batch, room = [], [], 24 + 4 * (self.epoch % 3)
        for index in order:
            if sum(lengths[i] for i in batch) + lengths[index] > room:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches.append(batch)
        random.shuffle(batches)
        return iter(batches)


class Curriculum(Sampler[int]):
    """More of the samples in every epoch; counts epochs by itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        easy = min(SAMPLES, 20 + 10 * self.epoch)
        return iter(torch.randperm(easy).tolist())


class Shuffled:
    """Changes what it uses again; has a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(3)
        self.order = list(range(SAMPLES))

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.order)
        return iter(self.order)


class Differs(Sampler[int]):
    """Another order on another worker."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(SAMPLES), key=lambda index: hash((index, WORKER == "w1"))))


dataset = TensorDataset(x, y)
weights = [1.0 + 4.0 * (index % 7 == 0) for index in range(SAMPLES)]
own = torch.Generator().manual_seed(5)
KINDS: dict[str, Any] = {
    "weighted": lambda: {"sampler": WeightedRandomSampler(weights, 70), "size": SIZE},
    "weighted, dropping": lambda: {"sampler": WeightedRandomSampler(weights, 70), "size": SIZE, "drop_last": True},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(10, 80), generator=own), "size": SIZE},
    "list": lambda: {"sampler": [*range(80, 10, -1), 3, 3, 3], "size": SIZE},
    "buckets": lambda: {"batch_sampler": Buckets()},
    "buckets, accumulated": lambda: {"batch_sampler": Buckets(), "accumulate": 3},
    "curriculum": lambda: {"sampler": Curriculum(), "size": SIZE},
    "in place": lambda: {"sampler": Shuffled(), "size": SIZE},
    "batches": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(70)), SIZE, drop_last=True)},
    "loader": lambda: {"dataset": DataLoader(dataset, SIZE, sampler=WeightedRandomSampler(weights, 70))},
    "differs": lambda: {"sampler": Differs(), "size": SIZE},
}


def drawn(kind: str) -> list[list[list[int]]]:
    """The global batches of every step, in every epoch."""
    given = {"dataset": dataset, **KINDS[kind]()}
    size, drop, accumulate = given.get("size"), given.get("drop_last", False), given.get("accumulate", 1)
    loader = given["dataset"]
    if isinstance(loader, DataLoader):
        given, size = {"sampler": loader.sampler}, loader.batch_size
    order = given.get("sampler", given.get("batch_sampler"))
    steps = []
    for epoch in range(EPOCHS):
        seed = order_seed(epoch, 0) if CASE.get("epochwise") else order_seed(SEED, epoch)
        random.seed(seed)
        torch.manual_seed(seed)
        own.manual_seed(seed + 1)
        if isinstance(order, Buckets):
            order.set_epoch(epoch)
        if isinstance(order, Shuffled):
            order.rng.seed(seed + 1)
        found: list[Any] = list(order)
        if "sampler" in given:
            found = [found[i : i + size] for i in range(0, len(found), size)]
            found = [batch for batch in found if len(batch) == size or not drop]
        steps += [found[i : i + accumulate] for i in range(0, len(found), accumulate)]
    return steps


def by_hand(net: nn.Module) -> int:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    steps, accumulate = drawn(CASE["kind"]), KINDS[CASE["kind"]]().get("accumulate", 1)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            ((net(x[batch]) - y[batch]).square().mean() / accumulate).backward()
        optimizer.step()
    return len(steps)


def by_job(net: nn.Module) -> int:
    job = stretto.join(consistency="bitwise" if CASE.get("bitwise") else None)
    job.model(net)
    optimizer = job.optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    given = {"dataset": dataset, **KINDS[CASE["kind"]]()}
    accumulate = given.get("accumulate", 1)
    options = {"seed": SEED, "per_worker": CASE.get("per_worker")}
    for batch in epochwise(job, given) if CASE.get("epochwise") else job.batches(**given, epochs=EPOCHS, **options):
        ((net(batch.x) - batch.y).square().mean() / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        pause(job)
    return job.step


def epochwise(job: Any, given: dict[str, Any]) -> Iterator[stretto.Batch]:
    """A loop for each epoch; the script says which it is."""
    for epoch in job.epochs(EPOCHS):
        given["batch_sampler"].set_epoch(epoch)
        yield from job.batches(**given, seed=epoch)


def turn_data(step: int) -> tuple[Tensor, Tensor]:
    """Of all places together."""
    made = torch.Generator().manual_seed(sample_seed(SEED, step, 0))
    inputs = torch.randn(12, 6, generator=made, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).cos()


def steps_by_hand(net: nn.Module) -> int:
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(CASE["steps"]):
        inputs, targets = turn_data(step)
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
    return CASE["steps"]


def steps_by_job(net: nn.Module) -> int:
    """Every place has as many rows, so that their mean is that of all."""
    job = stretto.join(consistency="bitwise" if CASE.get("bitwise") else None)
    job.model(net)
    optimizer = job.optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    for turn in job.steps(CASE["steps"], seed=SEED):
        assert turn.seed == sample_seed(SEED, turn.step, turn.place)
        inputs, targets = (part[turn.place :: turn.places] for part in turn_data(turn.step))
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        optimizer.step()
        pause(job)
    return job.step


def pause(job: Any) -> None:
    """Stands for the time that a larger model takes, until the test is in a hurry."""
    if WORKER != "alone" and not Path(os.environ["STRETTO_FOLDER"], "hurry").exists():
        time.sleep(0.02 if job.step < 20 else 0.1)


if __name__ == "__main__":
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    ways = (by_hand, by_job) if "kind" in CASE else (steps_by_hand, steps_by_job)
    count = ways[not CASE.get("plain")](model)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in model.state_dict().values()])
    result = {"steps": count, "last_epoch": 0, "weights": flat.tolist()}
    Path(os.environ["STRETTO_FOLDER"], f"{WORKER}.result").write_text(json.dumps(result))
