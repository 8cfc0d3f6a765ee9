"""A critic that learns twice as often as its generator, in micro-batches."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

torch.manual_seed(0)
points = torch.randn(400, 2, dtype=torch.float64) * 0.3 + torch.tensor([1.0, -0.5])

job = stretto.join()
critic_net = job.model(torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)).double())
generator_net = job.model(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).double())
opt_critic = job.optimizer(torch.optim.Adam(critic_net.parameters(), lr=0.003))
opt_generator = job.optimizer(torch.optim.Adam(generator_net.parameters(), lr=0.003))


def fakes() -> torch.Tensor:
    return generator_net(job.noise(4, dtype=torch.float64))  # by sample: the same at any number of workers


def critic(batch: stretto.Batch) -> None:
    (real,) = batch
    loss = F.softplus(-critic_net(real)).mean() + F.softplus(critic_net(fakes().detach())).mean()
    opt_critic.zero_grad()
    loss.backward()
    opt_critic.step()


def generator(batch: stretto.Batch) -> None:
    loss = F.softplus(-critic_net(fakes())).mean()
    opt_generator.zero_grad()
    loss.backward()
    opt_generator.step()


for batch in job.batches(TensorDataset(points), size=80, epochs=16, per_worker=16):
    job.phases(batch, critic, critic, generator)
if job.leader:
    torch.manual_seed(1)
    center = generator_net(torch.randn(500, 4, dtype=torch.float64)).mean(0)
    print(f"{job.step} steps, the middle of what it makes is at {center[0]:.4f}, {center[1]:.4f}")
