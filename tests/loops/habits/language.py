"""A small language model as nanoGPT has it: tied weights, layer norm, activation checkpoints, dropout at 0, groups with
decay and without, betas of its own, a rate computed for each step, clipping, gradients accumulated by the runtime."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from common import order
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from stretto.torch import Job

text = torch.randint(0, 20, (300,), generator=torch.Generator().manual_seed(6))


class Text(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return text[at : at + 8], text[at + 1 : at + 9]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(12), nn.LayerNorm(12)
        self.attention, self.out, self.inner, self.outer = (
            nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 24), nn.Linear(24, 12),
        )  # fmt: skip

    def forward(self, given: Tensor) -> Tensor:
        q, k, v = (one.unflatten(2, (2, 6)).transpose(1, 2) for one in self.attention(self.first(given)).split(12, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.0)
        given = given + self.out(mixed.transpose(1, 2).flatten(2))
        found: Tensor = given + self.outer(F.gelu(self.inner(self.second(given))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.places = nn.Embedding(20, 12), nn.Embedding(8, 12)
        self.blocks, self.norm, self.head = (
            nn.ModuleList([Block(), Block()]),
            nn.LayerNorm(12),
            nn.Linear(12, 20, False),
        )
        self.head.weight = self.words.weight

    def forward(self, given: Tensor, goal: Tensor) -> Tensor:
        found = self.words(given) + self.places(torch.arange(given.shape[1]))
        for block in self.blocks:
            found = checkpoint(block, found, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(found)).flatten(0, 1), goal.flatten())


def make(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def rate(step: int) -> float:
    if step < 8:
        return 0.01 * (step + 1) / 9
    return 0.001 + 0.5 * (1 + math.cos(math.pi * (step - 8) / 60)) * 0.009


def plain() -> dict[str, Tensor]:
    model = Model().double()
    optimizer = make(model)
    data = Text()
    for step, batch in enumerate(order(size=24, epochs=7)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        halves = [batch[:12], batch[12:]]
        for half in halves:
            given, goal = (torch.stack(part) for part in zip(*(data[at] for at in half), strict=True))
            (model(given, goal) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return dict(model.state_dict())


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(Model().double())
    optimizer = job.optimizer(make(model))
    for batch in job.batches(Text(), size=12, epochs=7, accumulate=2):
        for group in optimizer.param_groups:
            group["lr"] = rate(batch.step)
        given, goal = batch
        (model(given, goal) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return dict(model.state_dict())
