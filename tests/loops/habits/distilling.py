"""A student learns from a frozen teacher, which the job does not know, and from labels: two backward passes before one
step, through one graph that is kept, in several passes through the body."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from stretto.torch import Job

DIES_IN = 2


def learn(student: nn.Module, teacher: nn.Module, given: Tensor, goal: Tensor) -> None:
    found = student(given)
    F.cross_entropy(found, goal).mul(0.3).backward(retain_graph=True)
    with torch.no_grad():
        wanted = torch.softmax(teacher(given) / 2, 1)
    F.kl_div(torch.log_softmax(found / 2, 1), wanted, reduction="batchmean").mul(0.7 * 4).backward()


def plain() -> dict[str, Tensor]:
    student, teacher = net(1), net(2).eval().requires_grad_(False)
    optimizer = torch.optim.RMSprop(student.parameters(), lr=0.01)
    for batch in order():
        learn(student, teacher, x[batch], y[batch])
        optimizer.step()
        optimizer.zero_grad()
    return tensors(student)


def elastic(job: Job) -> dict[str, Tensor]:
    student, teacher = job.model(net(1)), net(2).eval().requires_grad_(False)
    optimizer = job.optimizer(torch.optim.RMSprop(student.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8, per_worker=5):
        learn(student, teacher, batch.x, batch.y)
        optimizer.step()
        optimizer.zero_grad()
    return tensors(student)
