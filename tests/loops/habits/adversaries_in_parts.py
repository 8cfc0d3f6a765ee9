"""A GAN whose critic learns twice as often as its generator, in parts of a slice: phases, each with noise of its own.
The worker dies when the first of them is done."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Batch, Job, chance

DIES_IN = 4
"""Of three workers the second has two parts: in the second phase."""


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(6, 6).double(), net()


def optimizers(maker: nn.Module, judge: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.Adam(judge.parameters(), lr=0.01), torch.optim.Adam(maker.parameters(), lr=0.01)


def judging(maker: nn.Module, judge: nn.Module, given: Tensor, noise: Tensor) -> Tensor:
    return F.softplus(-judge(given)[:, 0]).mean() + F.softplus(judge(maker(given + noise).detach())[:, 0]).mean()


def making(maker: nn.Module, judge: nn.Module, given: Tensor, noise: Tensor) -> Tensor:
    return F.softplus(-judge(maker(given + noise))[:, 0]).mean()


def plain() -> dict[str, Tensor]:
    maker, judge = nets()
    critic, generator = optimizers(maker, judge)
    for step, batch in enumerate(order(size=25)):
        for phase, optimizer, loss in ((1, critic, judging), (2, critic, judging), (3, generator, making)):
            noise = chance.noise(0, 0, step, batch, (6,), torch.float64, phase)
            optimizer.zero_grad()
            loss(maker, judge, x[batch], noise).backward()
            optimizer.step()
    return tensors(maker, judge)


def elastic(job: Job) -> dict[str, Tensor]:
    maker, judge = map(job.model, nets())
    critic, generator = map(job.optimizer, optimizers(maker, judge))
    lines: list[float] = []

    def learn_to_judge(batch: Batch) -> None:
        critic.zero_grad()
        judging(maker, judge, batch.x, job.noise(6, dtype=torch.float64)).backward()
        critic.step()
        job.once_per_step(lambda: lines.append(job.step))

    def learn_to_make(batch: Batch) -> None:
        generator.zero_grad()
        loss = making(maker, judge, batch.x, job.noise(6, dtype=torch.float64))
        loss.backward()
        generator.step()
        job.report(loss=loss)

    for batch in job.batches(TensorDataset(x), size=25, epochs=8, per_worker=4):
        job.phases(batch, learn_to_judge, learn_to_judge, learn_to_make)
    assert lines == list(range(81 - len(lines), 81)), "once for each step since this worker came"
    return tensors(maker, judge)
