"""Phases of a body whose batches are cut into passes: each is done on all of a batch before the next begins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stretto.backends.local.forkserver import ForkServer
from stretto.runtime.order import Loop, Order
from stretto.testing import Harness
from stretto.torch import Batch, Job, TrainingError, chance
from stretto.torch.state import Holder

DATA = TensorDataset(torch.randn(30, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
LOOP: dict[str, Any] = {"size": 10, "epochs": 4}


def alone(virtual_ranks: int = 0) -> Job:
    """A world of one."""
    return Job(torch.device("cpu"), None, None, Holder(), virtual_ranks)


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(2)
    return nn.Linear(4, 4).double(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


class Pair:
    """Two nets that learn in turns; `seen` is what was called."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.maker, self.judge = map(job.model, nets())
        self.makes = job.optimizer(torch.optim.Adam(self.maker.parameters(), lr=0.02))
        self.judges = job.optimizer(torch.optim.Adam(self.judge.parameters(), lr=0.02))
        self.seen: list[Any] = []

    def critic(self, batch: Batch) -> str:
        self.judges.zero_grad()
        (self.judge(batch.x).mean() - self.judge(self.maker(batch.x).detach()).square().mean()).backward()
        self.judges.step()
        self.seen.append(("critic", batch.step, batch.last, self.job.every(2)))
        return "judged"

    def generator(self, batch: Batch) -> int:
        self.makes.zero_grad()
        self.judge(self.maker(batch.x)).square().mean().backward()
        self.makes.step()
        self.seen.append(("generator", batch.step, batch.last, self.job.every(2)))
        self.job.once_per_step(lambda: self.seen.append("done"))
        return len(batch)

    def tensors(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector([*self.maker.parameters(), *self.judge.parameters()]).detach()


def plain() -> torch.Tensor:
    maker, judge = nets()
    makes, judges = (torch.optim.Adam(net.parameters(), lr=0.02) for net in (maker, judge))
    order = Order(Loop(samples=30, size=10, epochs=4, seed=0))
    for step in range(order.loop.total_steps):
        x = DATA.tensors[0][order.indices(step)]
        for _ in range(2):
            judges.zero_grad()
            (judge(x).mean() - judge(maker(x).detach()).square().mean()).backward()
            judges.step()
        makes.zero_grad()
        judge(maker(x)).square().mean().backward()
        makes.step()
    return nn.utils.parameters_to_vector([*maker.parameters(), *judge.parameters()]).detach()


@pytest.mark.parametrize(
    ("virtual_ranks", "how"),
    [(0, {}), (0, {"per_worker": 10}), (0, {"per_worker": 3}), (0, {"size": 5, "accumulate": 2}), (8, {})],
    ids=["whole", "one part", "parts", "accumulated", "bitwise"],
)
def test_as_without_passes(virtual_ranks: int, how: dict[str, Any]) -> None:
    pair = Pair(job := alone(virtual_ranks))
    halves = "accumulate" in how

    def half(phase: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        """A step of two batches has the sum of two means."""

        def halved(batch: Batch) -> Any:
            for group in (*pair.makes.param_groups, *pair.judges.param_groups):
                group["eps"] = 2e-8 if halves else 1e-8
            return phase(batch)

        return halved

    found = [
        job.phases(batch, half(pair.critic), half(pair.critic), half(pair.generator))
        for batch in job.batches(DATA, **(LOOP | how))
    ]
    assert torch.allclose(pair.tensors(), plain(), rtol=1e-10, atol=1e-12)
    assert job.step == 12
    assert len([one for one in found if one is not None]) == 12
    assert pair.seen.count("done") == 12


def test_the_order_and_what_is_told() -> None:
    pair = Pair(job := alone())
    found = [
        job.phases(batch, pair.critic, pair.critic, pair.generator)
        for batch in job.batches(DATA, size=10, per_worker=5, epochs=1, shuffle=False)
    ]
    assert found == [None, ["judged", "judged", 5]] * 3
    critic, generator = [("critic", 1, False, False), ("critic", 1, True, False)], ("generator", 1, False, False)
    assert pair.seen[7:14] == [
        *critic, critic[0], ("critic", 1, True, True), generator, ("generator", 1, True, True), "done",
    ]  # fmt: skip


def test_random_numbers_differ_between_phases_and_are_the_same_again() -> None:
    def drawn(per_worker: int) -> list[torch.Tensor]:
        job = alone()
        model = job.model(nn.Linear(4, 1).double())
        optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        found: list[torch.Tensor] = []

        def phase(batch: Batch) -> None:
            found.append(torch.cat([job.noise(2), torch.rand(len(batch), 2)]))
            model(batch.x).sum().backward()
            optimizer.step()

        for batch in job.batches(DATA, size=10, per_worker=per_worker, seed=3, epochs=1, shuffle=False):
            torch.rand(5)
            job.phases(batch, phase, phase)
        return found

    parts = drawn(5)
    assert all(map(torch.equal, parts, drawn(5)))
    assert len({tuple(one[0].tolist()) for one in parts}) == len(parts)
    assert len({tuple(one[-1].tolist()) for one in parts}) == len(parts)
    assert torch.equal(torch.cat([parts[2][:5], parts[3][:5]]), chance.noise(3, 0, 0, range(10), (2,), phase=2))


def no_function(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, pair.critic, pair.generator(batch))  # type: ignore[arg-type]


def no_batch(pair: Pair, batch: Batch) -> None:
    pair.job.phases(pair.critic, pair.generator)


def nothing(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch)


def twice(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, pair.critic)
    pair.job.phases(batch, pair.generator)


def inside_of_each_other(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, lambda one: pair.job.phases(one, pair.critic))


def steps_before(pair: Pair, batch: Batch) -> None:
    pair.critic(batch)
    pair.job.phases(batch, pair.generator)


def steps_after(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, pair.critic)
    pair.makes.step()


def backward_after(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, pair.critic)
    pair.maker(batch.x).sum().backward()


def no_backward(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, pair.critic, lambda one: pair.makes.step())


def only_in_the_last(pair: Pair, batch: Batch) -> None:
    if batch.last:
        pair.job.phases(batch, pair.critic)


def not_in_the_last(pair: Pair, batch: Batch) -> None:
    if not batch.last:
        pair.job.phases(batch, pair.critic)


def more_in_the_last(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, *[pair.critic] * (2 if batch.last else 1))


def two_in_one(pair: Pair, batch: Batch) -> None:
    pair.job.phases(batch, lambda one: (pair.critic(one), pair.generator(one)))


MISTAKES = {
    no_function: "functions of a batch: one of them is a int",
    no_batch: "the first argument is the function critic",
    nothing: "functions of a batch: none was given",
    twice: "step 0: phases() was called twice in one body",
    inside_of_each_other: "phases() was called by a phase",
    steps_before: "step 0: a body that calls phases() has a backward pass or a step() outside of them",
    steps_after: "step 0: a body that calls phases() has a backward pass or a step() outside of them",
    backward_after: "step 0: a body that calls phases() has a backward pass or a step() outside of them",
    no_backward: "step 0: the phase <lambda> did no backward pass",
}
IN_PARTS = {
    only_in_the_last: "step 0: phases() was called in some passes through the body only",
    not_in_the_last: "step 0: phases() was called in some passes through the body only",
    more_in_the_last: "step 0: phases() got 1 phases in one pass through the body and 2 in another",
    two_in_one: "step 0: a backward pass follows a step() in one body",
}


@pytest.mark.parametrize(
    ("mistake", "per_worker"),
    [(one, size) for one in MISTAKES for size in (None, 5)] + [(one, 5) for one in IN_PARTS],
)
def test_mistakes_get_one_clear_error(mistake: Callable[[Pair, Batch], None], per_worker: int | None) -> None:
    pair = Pair(job := alone())

    def train() -> None:
        for batch in job.batches(DATA, size=10, per_worker=per_worker):
            mistake(pair, batch)

    with pytest.raises(TrainingError) as raised:
        train()
    assert (MISTAKES | IN_PARTS)[mistake] in str(raised.value)


def test_outside_of_a_loop() -> None:
    pair = Pair(job := alone())
    with pytest.raises(TrainingError, match="this is no body of a loop"):
        job.phases("batch", pair.critic)


def test_a_step_that_waits_is_let_through_after_a_loop_was_left() -> None:
    """What a phase left over is applied after the loop, as in other bodies."""
    job = alone()
    model = job.model(nn.Linear(4, 1).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.clone()
    for batch in job.batches(DATA, size=10, per_worker=5):
        job.phases(batch, lambda one: model(one.x).sum().backward())
    optimizer.step()
    assert not torch.equal(before, model.weight)


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.mark.parametrize("mode", ["default", "bitwise"])
@pytest.mark.parametrize("phase", [1, 2, 3])
def test_a_death_in_any_phase(tmp_path: Path, warm: ForkServer, mode: str, phase: int) -> None:
    """Everything since the batch's start is taken back. (The members have different numbers of parts.)"""
    case = {**chaos.MODES[mode], "epochs": 8, "loops": 1, "linger": 1, "body": "phases", "dies_in": [11, phase]}
    right = chaos.reference(tmp_path / "alone", case, warm=warm)
    with Harness(
        tmp_path / "job",
        [sys.executable, str(chaos.SCRIPT)],
        workers=3,
        min_workers=3,
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=chaos.OPTIONS,
        warm=warm,
    ) as harness:
        harness.wait(lambda: harness.over or len(harness.members()) == 2, "one has died")
        harness.want(3)
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert [worker.status for worker in harness.workers].count(-9) == 1
        chaos.check(harness, case, right)
