"""Scripts that would train another model than they say, each in its own way: they are refused, by hand and elastic."""

from __future__ import annotations

import itertools
import sys

import torch
import torch.nn.functional as F
from common import net, x, y
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stretto.torch import Job

DATA = TensorDataset(x, y)
Parts = tuple[nn.Sequential, torch.optim.Optimizer]


def _registered(job: Job) -> Parts:
    model = job.model(net())
    return model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def a_stranger_steps(job: Job) -> None:
    model = job.model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in job.batches(DATA, size=24):
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def gradients_by_hand(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24):
        loss = F.cross_entropy(model(batch.x), batch.y)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()


def a_plain_loop(job: Job) -> None:
    model, optimizer = _registered(job)
    for given, wanted in DataLoader(DATA, batch_size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(given), wanted).backward()
        optimizer.step()


def phases_in_passes(job: Job) -> None:
    model, optimizer = _registered(job)
    other = job.model(nn.Linear(3, 3).double())
    second = job.optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    for batch in job.batches(DATA, size=24, per_worker=100):
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        F.cross_entropy(other(model(batch.x).detach()), batch.y).backward()
        second.step()


def phases_in_accumulation(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, accumulate=2):
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()


def an_early_exit(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=5):
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 25:
            sys.exit(0)


def thawed_behind_its_back(job: Job) -> None:
    model, optimizer = _registered(job)
    model[4].requires_grad_(False)
    for batch in job.batches(DATA, size=24, epochs=5):
        optimizer.zero_grad()
        if batch.step == 7:
            model[4].weight.requires_grad_(True)
        hidden = model[:4](batch.x)
        F.cross_entropy(F.linear(hidden, model[4].weight, model[4].bias), batch.y).backward()
        optimizer.step()


REFUSED = {
    a_stranger_steps: "SGD steps on parameters of the job, but was not registered",
    gradients_by_hand: "step() was called on gradients that came from no backward pass of this batch",
    a_plain_loop: "SGD was asked to step outside of the job's loops",
    phases_in_passes: "a backward pass follows a step() in one body",
    phases_in_accumulation: "a backward pass follows a step() in one body",
    an_early_exit: "the script ended inside its loop, at step 26 of 50",
    thawed_behind_its_back: "a parameter began to require gradients in the middle of the forward pass",
}


def the_leader_leaves(job: Job) -> None:
    """One worker ends its epochs alone; by hand there are no others."""
    model, optimizer = _registered(job)
    for epoch in job.epochs(6):
        for batch in job.batches(DATA, size=24, seed=epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()
        if epoch == 2 and job.rank == 0:
            break


def a_local_decision(job: Job) -> None:
    """The rate follows the loss of this worker's samples."""
    model, optimizer = _registered(job)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in job.batches(DATA, size=24, epochs=5):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())


def a_rank_of_its_own(job: Job) -> None:
    """Weights are changed on one worker, late."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=5):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 30 and job.rank == 1:
            model[2].bias.data[3] += 1e-9


def a_stranger_in_passes(job: Job) -> None:
    """It steps in every pass through the body, of which one worker has more than the other."""
    model = job.model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for batch in job.batches(DATA, size=25, per_worker=12):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def thawing(job: Job) -> None:
    """Right as it is; wrong if nobody notices that a layer is thawed in the body."""
    model, optimizer = _registered(job)
    model[0].requires_grad_(False)
    for batch in job.batches(DATA, size=24, epochs=5):
        if batch.step == 12:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


PARTED = {
    a_local_decision: "came to differ",
    a_rank_of_its_own: "the workers train different models: 2.bias came to differ",
    thawing: "the workers train different models: 0.weight, 0.bias came to differ between",
    a_stranger_in_passes: "came to differ",
    gradients_by_hand: "came to differ",
}
"""What only the comparison of replicas finds, the other checks being switched off."""

ALL = {one.__name__: one for one in itertools.chain(REFUSED, PARTED, [the_leader_leaves])}
