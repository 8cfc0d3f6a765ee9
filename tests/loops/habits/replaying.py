"""Q-learning as in CleanRL: a buffer of what was seen that is part of the state, learning in every second step from the
tenth on (so the first bodies have no backward pass), a target net that follows by hand after each step, behind
autograd's back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from common import net, tensors
from torch import Tensor, nn

from stretto.torch import Job

STEPS, SEEN = 80, 24


class Buffer:
    """A ring of arrays."""

    def __init__(self, size: int = 200) -> None:
        self.seen, self.next = np.zeros((size, 6)), np.zeros((size, 6))
        self.acted, self.gained = np.zeros(size, dtype=np.int64), np.zeros(size)
        self.at = self.filled = 0

    def add(self, seen: Any, acted: int, gained: float, following: Any) -> None:
        self.seen[self.at], self.acted[self.at], self.gained[self.at], self.next[self.at] = (
            seen,
            acted,
            gained,
            following,
        )
        self.at = (self.at + 1) % len(self.gained)
        self.filled = min(self.filled + 1, len(self.gained))

    def sample(self, chosen: Any) -> list[Tensor]:
        return [torch.from_numpy(part[chosen]) for part in (self.seen, self.acted, self.gained, self.next)]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def act(model: nn.Module, buffer: Buffer, step: int) -> None:
    """Every worker plays the same game."""
    chance = np.random.default_rng(step)
    for _ in range(6):
        seen = chance.normal(size=6)
        with torch.no_grad():
            best = int(model(torch.from_numpy(seen)).argmax())
        action = int(chance.integers(3)) if chance.random() < 0.3 else best
        buffer.add(seen, action, float(seen[action]), np.roll(seen, 1))


def loss_of(model: nn.Module, target: nn.Module, some: list[Tensor]) -> Tensor:
    seen, acted, gained, following = some
    with torch.no_grad():
        goal = gained + 0.9 * target(following).max(1).values
    return (model(seen).gather(1, acted[:, None])[:, 0] - goal).square().sum()


def follow(model: nn.Module, target: nn.Module) -> None:
    for new, old in zip(model.parameters(), target.parameters(), strict=True):
        old.data.copy_(0.1 * new.data + 0.9 * old.data)


def chosen(step: int, filled: int) -> Any:
    return np.random.default_rng(10_000 + step).integers(filled, size=SEEN)


def plain() -> dict[str, Tensor]:
    model, target, buffer = net(), net().requires_grad_(False), Buffer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        act(model, buffer, step)
        if step < 10 or step % 2:
            continue
        optimizer.zero_grad()
        (loss_of(model, target, buffer.sample(chosen(step, buffer.filled))) / SEEN).backward()
        optimizer.step()
        follow(model, target)
    return {**tensors(model, target), "gained": torch.from_numpy(buffer.gained)}


def elastic(job: Job) -> dict[str, Tensor]:
    model, target, buffer = job.model(net()), job.model(net()).requires_grad_(False), job.keep("buffer", Buffer())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for turn in job.steps(STEPS):
        act(model, buffer, turn.step)
        if turn.step < 10 or turn.step % 2:
            continue
        optimizer.zero_grad()
        own = chosen(turn.step, buffer.filled)[turn.place :: turn.places]
        (loss_of(model, target, buffer.sample(own)) * turn.places / SEEN).backward()
        optimizer.step()
        follow(model, target)
    return {**tensors(model, target), "gained": torch.from_numpy(buffer.gained)}
