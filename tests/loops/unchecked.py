"""Scripts that would train another model if nobody looked, or took care: each beside what plain PyTorch makes of it.

With run.py a check, or a mechanism, can be switched off under them; see test_checks_matter.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import mistakes
import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from habits import adversaries
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from stretto.torch import Job

Result = dict[str, Tensor]
DATA = TensorDataset(x, y)
EPOCHS = 3


def one(_: int) -> float:
    return 1.0


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any], scale: Callable[[int], float] = one
) -> None:
    for given, wanted in batches:
        optimizer.zero_grad()
        (F.cross_entropy(model(given), wanted) * scale(len(given))).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def registered(job: Job) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = job.model(net())
    return model, job.optimizer(sgd(model))


def plain(batches: Iterable[Any]) -> Result:
    model = net()
    train(model, sgd(model), batches)
    return tensors(model)


def rows(epochs: int = EPOCHS, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(x[batch], y[batch]) for batch in order(epochs=epochs, seed=seed)]


def adversaries_in_passes(job: Job) -> Result:
    """The first step of a batch is withheld until its last pass: the second net learns from the old first one."""
    maker, judge = map(job.model, adversaries.nets())
    both: list[torch.optim.Optimizer] = [
        job.optimizer(torch.optim.Adam(judge.parameters(), lr=0.01)),
        job.optimizer(torch.optim.Adam(maker.parameters(), lr=0.01)),
    ]
    batches = job.batches(TensorDataset(x), size=24, epochs=8, per_worker=8)
    adversaries.train(maker, judge, both, (batch.x for batch in batches))
    return tensors(maker, judge)


def uphill(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    """Sharpness-aware, for people who look whether there is a gradient."""
    for given, wanted in batches:
        F.cross_entropy(model(given), wanted).backward()
        moved = [(p, p.detach().clone()) for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, _ in moved:
                p.add_(p.grad, alpha=0.5)
        optimizer.zero_grad()
        F.cross_entropy(model(given), wanted).backward()
        with torch.no_grad():
            for p, before in moved:
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()


def sharpness_in_passes(job: Job) -> Result:
    model, optimizer = registered(job)
    uphill(model, optimizer, job.batches(DATA, size=24, epochs=EPOCHS, per_worker=8))
    return tensors(model)


def plain_sharpness() -> Result:
    model = net()
    uphill(model, sgd(model), rows())
    return tensors(model)


def in_twenties(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Result:
    """Gradients are added up over twenty batches."""
    for number, (given, wanted) in batches:
        (F.cross_entropy(model(given), wanted) / 20).backward()
        if (number + 1) % 20 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(model)


def accumulating(job: Job) -> Result:
    model, optimizer = registered(job)
    return in_twenties(model, optimizer, ((job.step, batch) for batch in job.batches(DATA, size=24, epochs=EPOCHS)))


def plain_accumulating() -> Result:
    model = net()
    return in_twenties(model, sgd(model), enumerate(rows()))


def a_loop_without_batches(job: Job) -> Result:
    """Every worker trains by itself, and the job knows of no step."""
    model, optimizer = registered(job)
    train(model, optimizer, rows())
    return {**tensors(model), "steps": torch.tensor(float(job.step))}


def leaving_alone(job: Job) -> Result:
    """What it ends with, the others train on from."""
    model, optimizer = registered(job)
    for epoch in job.epochs(EPOCHS):
        train(model, optimizer, job.batches(DATA, size=24, seed=epoch))
        if epoch == 0 and job.rank == 0:
            break
    return tensors(model)


def exiting_early(job: Job) -> Result:
    """It is over before there is a result."""
    model, optimizer = registered(job)
    for batch in job.batches(DATA, size=24, epochs=EPOCHS):
        train(model, optimizer, [batch])
        if batch.step == 25:
            sys.exit(0)
    return tensors(model)


def a_sum_of_a_slice(job: Job) -> Result:
    """Divided by the size of the global batch."""
    model, optimizer = registered(job)
    train(model, optimizer, job.batches(DATA, size=24, epochs=EPOCHS), lambda samples: samples / 24)
    return tensors(model)


class Jittering(Dataset[tuple[Tensor, Tensor]]):
    """With a generator of its own: what a sample is depends on how many were read before it."""

    def __init__(self) -> None:
        self._luck = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return x[index] + 0.3 * torch.randn(6, generator=self._luck, dtype=torch.float64), y[index]


def data_of_its_own(job: Job) -> Result:
    model, optimizer = registered(job)
    train(model, optimizer, job.batches(Jittering(), size=24, epochs=EPOCHS))
    return tensors(model)


def plain_data_of_its_own() -> Result:
    read = Jittering()
    samples = [[read[index] for index in batch] for batch in order(epochs=EPOCHS)]
    return plain((torch.stack([a for a, _ in some]), torch.stack([b for _, b in some])) for some in samples)


def side_by_side(job: Job) -> Result:
    """Labelled samples and others, side by side."""
    model, optimizer = registered(job)
    for batch, other in zip(job.batches(DATA, size=24), job.batches(DATA, size=48, epochs=2, seed=1), strict=False):
        together(model, optimizer, batch.x, batch.y, other.x)
    return tensors(model)


def together(model: nn.Module, optimizer: torch.optim.Optimizer, given: Tensor, wanted: Tensor, other: Tensor) -> None:
    optimizer.zero_grad()
    (F.cross_entropy(model(given), wanted) + model(other).square().mean()).backward()
    optimizer.step()


def plain_side_by_side() -> Result:
    model = net()
    optimizer = sgd(model)
    others = order(size=48, epochs=2, seed=1)
    for (given, wanted), other in zip(rows(1), others, strict=True):
        together(model, optimizer, given, wanted, x[other])
    return tensors(model)


def numbers_of_slices(job: Job) -> Result:
    """How many different numbers a batch gets."""
    model, optimizer = registered(job)
    different = 0
    for batch in job.batches(DATA, size=24, epochs=EPOCHS):
        drawn = job.all_gather(torch.rand(len(batch.x), dtype=torch.float64))
        train(model, optimizer, [batch])
        different = max(different, len(drawn.unique()))
    return {"different": torch.tensor(float(different))}


def counting_passes(job: Job) -> Result:
    """A buffer moves with every forward pass, of which a step takes fewer on more workers."""
    model = job.model(mistakes.Tempered())
    train(model, job.optimizer(sgd(model)), job.batches(DATA, size=24, epochs=EPOCHS, per_worker=5))
    return tensors(model)


def plain_counting() -> Result:
    """By hand a step takes five passes, of which the last has four samples; all of them are of one batch."""
    model = mistakes.Tempered()
    optimizer = sgd(model)
    for given, wanted in rows():
        optimizer.zero_grad()
        for some, goal in zip(given.split(5), wanted.split(5), strict=True):
            (F.cross_entropy(model(some), goal) * (len(some) / len(given))).backward()
        optimizer.step()
    return tensors(model)


ALL: dict[str, Any] = {
    elastic.__name__: SimpleNamespace(plain=right, elastic=elastic)
    for elastic, right in {
        adversaries_in_passes: adversaries.plain,
        sharpness_in_passes: plain_sharpness,
        accumulating: plain_accumulating,
        a_loop_without_batches: lambda: {**plain(rows()), "steps": torch.tensor(float(len(rows())))},
        leaving_alone: lambda: plain(rows(1)),
        exiting_early: lambda: plain(rows()[:26]),
        a_sum_of_a_slice: lambda: plain(rows()),
        data_of_its_own: plain_data_of_its_own,
        side_by_side: plain_side_by_side,
        counting_passes: plain_counting,
        numbers_of_slices: lambda: {"different": torch.tensor(24.0)},
    }.items()
}
