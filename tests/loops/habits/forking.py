"""The body starts processes of its own, by fork and by multiprocessing, which end in every way there is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

import torch
import torch.nn.functional as F
from common import net, order, tensors, x, y
from torch import Tensor
from torch.utils.data import TensorDataset

from stretto.torch import Job


def plain() -> dict[str, Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in order():
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return tensors(model)


def fork(how: int) -> None:
    child = os.fork()
    if not child:
        if how == 0:
            sys.exit(0)
        if how == 1:
            raise ValueError("a child's own trouble")
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    os.waitpid(child, 0)


def elastic(job: Job) -> dict[str, Tensor]:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=8):
        if batch.step % 10 == 5:
            fork(batch.step // 10 % 3)
            other = multiprocessing.get_context("fork").Process(target=signal.pause)
            other.start()
            other.terminate()
            other.join()
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
    return tensors(model)
