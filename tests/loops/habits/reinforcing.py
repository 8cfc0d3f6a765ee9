"""REINFORCE with a baseline that learns too: episodes are played anew in each step, those of a place are those that its
number gives."""

from __future__ import annotations

from typing import Any

import torch
from common import net, tensors
from torch import Tensor, nn

from stretto.torch import Job

STEPS, EPISODES = 70, 12


class Policy:
    """Six numbers, three actions, five moves: the sum of what is at the place of the action is to be high."""

    def __init__(self, model: nn.Module, value: nn.Module) -> None:
        self.model, self.value = model, value

    def play(self, step: int, episode: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(1000 * step + episode)
        state = torch.randn(6, generator=chance, dtype=torch.float64)
        logs, returns = [], torch.zeros((), dtype=torch.float64)
        for _ in range(3):
            odds = torch.log_softmax(self.model(state), 0)
            with torch.no_grad():
                action = int(torch.multinomial(odds.exp(), 1, generator=chance))
            logs.append(odds[action])
            returns = returns + state[action]
            state = state.roll(action + 1)
        return torch.stack(logs).sum(), returns

    def loss(self, step: int, episodes: list[int]) -> Tensor:
        played = [self.play(step, episode) for episode in episodes]
        first = torch.ones(1, dtype=torch.float64)
        losses = [
            -log * (gained - self.value(first).detach().squeeze()) + (self.value(first).squeeze() - gained).square()
            for log, gained in played
        ]
        return torch.stack(losses).sum()


def nets() -> tuple[nn.Module, nn.Module]:
    return net(), nn.Linear(1, 1).double()


def plain() -> dict[str, Tensor]:
    both = nets()
    optimizer = torch.optim.Adam([p for one in both for p in one.parameters()], lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        (Policy(*both).loss(step, list(range(EPISODES))) / EPISODES).backward()
        optimizer.step()
    return tensors(*both)


def elastic(job: Job) -> dict[str, Any]:
    both = nets()
    policy = Policy(*map(job.model, both))
    optimizer = job.optimizer(torch.optim.Adam([p for one in both for p in one.parameters()], lr=0.02))
    for turn in job.steps(STEPS):
        episodes = list(range(turn.place, EPISODES, turn.places))
        optimizer.zero_grad()
        # The mean over all episodes: places with more of them count for more.
        (policy.loss(turn.step, episodes) * turn.places / EPISODES).backward()
        optimizer.step()
    return tensors(*both)
