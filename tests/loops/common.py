"""What the habits share: data, a small net, and the global batches as plain lists of indices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stretto.runtime.order import Loop, Order

SAMPLES = 240
_generator = torch.Generator().manual_seed(1)
x = torch.randn(SAMPLES, 6, generator=_generator, dtype=torch.float64)
y = torch.randint(0, 3, (SAMPLES,), generator=_generator)


def net(seed: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def order(size: int = 24, epochs: int = 8, seed: int = 0, samples: int = SAMPLES) -> Iterator[list[int]]:
    """The global batches that `job.batches` hands out for these arguments."""
    batches = Order(Loop(samples=samples, size=size, epochs=epochs, seed=seed))
    for step in range(batches.loop.total_steps):
        yield batches.indices(step).tolist()


def tensors(*parts: nn.Module) -> dict[str, Tensor]:
    return {f"{i}.{name}": value for i, part in enumerate(parts) for name, value in part.state_dict().items()}
