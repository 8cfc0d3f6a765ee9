"""A Wasserstein GAN with a gradient penalty: a gradient of a gradient for the critic, and a generator that learns in
every third batch."""

from __future__ import annotations

import torch
from common import net, order, tensors, x
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job, chance


class Trainer:
    def __init__(self, generator: nn.Module, critic: nn.Module) -> None:
        self.generator, self.critic = generator, critic
        self.for_critic = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
        self.for_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9))

    def penalty(self, real: Tensor, fake: Tensor, mixed: Tensor) -> Tensor:
        between = (mixed * real + (1 - mixed) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between)[:, 0].sum(), between, create_graph=True)
        return (slope.norm(2, dim=1) - 1).square().mean()

    def learn(self, step: int, real: Tensor, noise: Tensor) -> None:
        self.for_critic.zero_grad()
        fake = self.generator(noise).detach()
        loss = self.critic(fake)[:, 0].mean() - self.critic(real)[:, 0].mean()
        (loss + 10 * self.penalty(real, fake, torch.sigmoid(noise[:, :1]))).backward()
        self.for_critic.step()
        if step % 3 == 0:
            self.for_generator.zero_grad()
            (-self.critic(self.generator(noise))[:, 0].mean()).backward()
            self.for_generator.step()


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(6, 6).double(), net()


def plain() -> dict[str, Tensor]:
    trainer = Trainer(*nets())
    for step, batch in enumerate(order()):
        trainer.learn(step, x[batch], chance.noise(0, 0, step, batch, (6,), torch.float64))
    return tensors(trainer.generator, trainer.critic)


def elastic(job: Job) -> dict[str, Tensor]:
    trainer = Trainer(*map(job.model, nets()))
    job.optimizer(trainer.for_critic)
    job.optimizer(trainer.for_generator)
    for batch in job.batches(TensorDataset(x), size=24, epochs=8):
        trainer.learn(batch.step, batch.x, job.noise(6, dtype=torch.float64))
    return tensors(trainer.generator, trainer.critic)
