"""A variational autoencoder, whose noise is drawn for each sample; the weight of one part of the loss grows with the
steps, and the leader saves the model with `torch.save` after each epoch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from common import order, tensors, x
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job, chance

EPOCHS = 7


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.Softplus(), nn.Linear(12, 6))

    def forward(self, given: Tensor, noise: Tensor, beta: float) -> Tensor:
        mean, log_var = self.encoder(given).chunk(2, 1)
        found = self.decoder(mean + noise * (0.5 * log_var).exp())
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
        return ((found - given).square().sum(1) + beta * kl).mean()


def save(path: Path, model: nn.Module, epoch: int) -> None:
    torch.save({"model": model.state_dict(), "epoch": epoch}, path / f"vae-{epoch}.pt")


def train_epoch(
    model: VAE, optimizer: torch.optim.Optimizer, noisy: Callable[[], Tensor], given: Tensor, step: int
) -> None:
    optimizer.zero_grad()
    model(given, noisy(), min(1.0, step / 40)).backward()
    optimizer.step()


def plain() -> dict[str, Tensor]:
    model = VAE().double()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        for step, batch in enumerate(order(epochs=1, seed=epoch)):
            noise = chance.noise(epoch, epoch, step, batch, (4,), torch.float64)
            train_epoch(model, optimizer, lambda: noise, x[batch], 10 * epoch + step)  # noqa: B023
        if epoch == 3:
            middle = {f"middle {name}": value.clone() for name, value in tensors(model).items()}
    return {**tensors(model), **middle}


def elastic(job: Job) -> dict[str, Tensor]:
    folder = Path(sys.argv[2])
    model = job.model(VAE().double())
    optimizer = job.optimizer(torch.optim.Adamax(model.parameters(), lr=0.01))
    for epoch in job.epochs(EPOCHS):
        for batch in job.batches(TensorDataset(x), size=24, seed=epoch):
            train_epoch(model, optimizer, lambda: job.noise(4, dtype=torch.float64), batch.x, 10 * epoch + batch.step)
        if job.leader:
            save(folder, model, epoch)
    middle = torch.load(folder / "vae-3.pt")["model"]
    return {**tensors(model), **{f"middle 0.{name}": value for name, value in middle.items()}}
