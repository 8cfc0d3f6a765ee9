"""Reinforcement learning without a dataset: each worker plays its part of the games of a step.

python examples/habits/policy_gradient.py
"""

import torch
from torch import Tensor, nn

import stretto.torch as stretto

GAMES, MOVES = 24, 10


def play(policy: nn.Module, games: range, step: int) -> tuple[Tensor, Tensor]:
    """Walk to the middle of a line: the log-probability of all moves of each game, and what it won."""
    chances, wins = [], []
    for game in games:
        luck = torch.Generator().manual_seed(1_000_000 * step + game)  # By the game, not by who plays it.
        place, chance = torch.rand(1, generator=luck) * 2 - 1, torch.zeros(())
        for _ in range(MOVES):
            right = torch.sigmoid(policy(place))
            goes_right = torch.rand(1, generator=luck) < right.detach()
            chance = chance + torch.where(goes_right, right, 1 - right).log().sum()
            place = place + torch.where(goes_right, 0.2, -0.2)
        chances.append(chance)
        wins.append(-place.abs().sum())
    return torch.stack(chances), torch.stack(wins)


torch.manual_seed(0)
job = stretto.join()
policy = job.model(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
opt = job.optimizer(torch.optim.Adam(policy.parameters(), lr=0.05))
for turn in job.steps(40):
    chances, wins = play(policy, range(turn.place, GAMES, turn.places), turn.step)
    # All places count alike: a sum over this one's games, divided by what a place has on average.
    loss = -((wins + 0.5) * chances).sum() / (GAMES / turn.places)
    opt.zero_grad()
    loss.backward()
    opt.step()
    job.report(loss=loss)

with torch.no_grad():
    _, wins = play(policy, range(50), 10**6)
if job.leader:
    print(f"{job.step} steps, {-wins.mean():.2f} from the middle")
