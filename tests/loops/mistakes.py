"""Scripts that would train another model than they say, each in its own way: they are refused, by hand and elastic."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import net, x, y
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import stretto.torch as stretto
from stretto.torch import Batch, Job

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


def breaking_off(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, per_worker=6):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 5:
            break


def decaying_in_passes(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, per_worker=6):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step % 7 == 6:
            optimizer.param_groups[0]["lr"] *= 0.9


def synchronizing_late(job: Job) -> None:
    model = job.model(nn.Sequential(nn.BatchNorm1d(x.shape[1]), nn.Linear(x.shape[1], 3)).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for batch in job.batches(DATA, size=24, per_worker=6):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


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


def wrapped_in_ddp(job: Job) -> None:
    """As a script for torchrun has it."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    job.model(nn.parallel.DistributedDataParallel(net()))


def a_distributed_sampler(job: Job) -> None:
    model, optimizer = _registered(job)
    sampler = DistributedSampler(DATA, num_replicas=max(1, job.size), rank=max(0, job.rank))
    for batch in job.batches(DATA, size=24, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(x, y, strict=True)


def a_stream(job: Job) -> None:
    _registered(job)
    for _ in job.batches(DataLoader(Stream(), batch_size=24)):
        pass


def a_closure(job: Job) -> None:
    model = job.model(net())
    optimizer = job.optimizer(torch.optim.LBFGS(model.parameters()))
    for batch in job.batches(DATA, size=24):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.x), batch.y)
            loss.backward()
            return loss

        optimizer.step(closure)


def sparse_gradients(job: Job) -> None:
    model = job.model(nn.EmbeddingBag(30, 3, sparse=True).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    words = torch.randint(0, 30, (240, 5), generator=torch.Generator().manual_seed(2))
    for batch in job.batches(TensorDataset(words, y), size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def two_at_once(job: Job) -> None:
    """Labelled and other samples, from two loops side by side."""
    model, optimizer = _registered(job)
    for batch, other in zip(job.batches(DATA, size=24), job.batches(DATA, size=48, epochs=2), strict=True):
        optimizer.zero_grad()
        (F.cross_entropy(model(batch.x), batch.y) + model(other.x).square().mean()).backward()
        optimizer.step()


def one_inside_another(job: Job) -> None:
    """More samples, by `next` in the body."""
    model, optimizer = _registered(job)
    more = job.batches(DATA, size=48, epochs=9)
    for batch in job.batches(DATA, size=24):
        optimizer.zero_grad()
        (F.cross_entropy(model(batch.x), batch.y) + model(next(more).x).square().mean()).backward()
        optimizer.step()


def joined_twice(job: Job) -> None:
    _registered(job)
    stretto.join()


def steps_in_backward(job: Job) -> None:
    """An optimizer for each parameter, stepped by a hook as soon as there is a gradient."""
    model = job.model(net())
    optimizers = {p: job.optimizer(torch.optim.SGD([p], lr=0.1)) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for batch in job.batches(DATA, size=24):
        F.cross_entropy(model(batch.x), batch.y).backward()


def moved_in_passes(job: Job) -> None:
    """Weights are moved along a gradient that is there only in the last pass, and put back: SAM, in passes."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, per_worker=5):
        F.cross_entropy(model(batch.x), batch.y).backward()
        before = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.05)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        with torch.no_grad():
            for p, old in zip(model.parameters(), before, strict=True):
                p.copy_(old)
        optimizer.step()
        optimizer.zero_grad()


class _Average:
    def __init__(self, model: nn.Module) -> None:
        self.weights = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mean, p in zip(self.weights, model.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = [one.clone() for one in state["weights"]]


def an_average_in_every_pass(job: Job) -> None:
    """It moves as often as the batch has passes, not once per step."""
    model, optimizer = _registered(job)
    average = job.keep("average", _Average(net(8)))
    for batch in job.batches(DATA, size=24, per_worker=5):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        average.update(model)


def a_target_in_every_pass(job: Job) -> None:
    model, optimizer = _registered(job)
    target = job.model(net(8)).requires_grad_(False)
    for batch in job.batches(DATA, size=24, per_worker=5):
        optimizer.zero_grad()
        (F.cross_entropy(model(batch.x), batch.y) + F.mse_loss(model(batch.x), target(batch.x))).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, p in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 0.1)


def a_skipped_pass(job: Job) -> None:
    """What is left out depends on the samples of a pass."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, per_worker=5, shuffle=False):
        if 9 in batch.indices or 23 in batch.indices:
            continue
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def no_model(job: Job) -> None:
    model = net()
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DATA, size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def an_odd_part(job: Job) -> None:
    """Kept with a state that cannot travel."""
    model, optimizer = _registered(job)

    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"model": model}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    job.keep("odd", Odd())
    for batch in job.batches(DATA, size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def a_new_optimizer_in_the_body(job: Job) -> None:
    """Registered in the middle of a loop."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=5):
        if batch.step == 20:
            optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def a_new_layer_in_the_body(job: Job) -> None:
    """A layer that is put in as training goes."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=5):
        if batch.step == 20:
            model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": model[-1].parameters()})
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


REFUSED = {
    a_stranger_steps: "SGD steps on parameters of the job, but was not registered",
    gradients_by_hand: "step() was called on gradients that came from no backward pass of this batch",
    a_plain_loop: "SGD was asked to step outside of the job's loops",
    phases_in_passes: "a backward pass follows a step() in one body",
    phases_in_accumulation: "a backward pass follows a step() in one body",
    an_early_exit: "the script ended inside its loop, at step 26 of 50",
    wrapped_in_ddp: "the model is wrapped in DistributedDataParallel",
    a_distributed_sampler: "a DistributedSampler gives each worker a slice of its own",
    a_stream: "a Stream has no length: batches() must know every sample by its index",
    a_closure: "optimizers that call a closure (LBFGS) evaluate the model several times: not supported",
    sparse_gradients: "a gradient has the layout torch.sparse_coo, which cannot be summed over workers",
    two_at_once: "two loops of batches() or steps() were gone through at once",
    one_inside_another: "two loops of batches() or steps() were gone through at once",
    joined_twice: "join() was called twice",
    steps_in_backward: "step() was called inside of the backward pass",
    moved_in_passes: "a backward pass follows a change of parameters by hand in one body",
    an_average_in_every_pass: "the part 'average' changed in a pass through the body that is not the last",
    a_target_in_every_pass: "changed in a pass through the body that is not the last of its step",
    a_skipped_pass: "the last pass of this worker went on without a backward pass",
    no_model: "SGD has a parameter of shape (16, 6) that belongs to no model of the job",
    an_odd_part: "a Sequential cannot be part of the state of a job",
    a_new_optimizer_in_the_body: "the optimizer Adam was registered in the body of a loop",
    a_new_layer_in_the_body: "SGD was given a parameter of shape (3, 3) that was made",
    breaking_off: "the script left its loop by break in step 5, in a pass through the body that is not the last",
    decaying_in_passes: "step 6: lr of group 0 of SGD changed in a pass through the body that is not the last",
    synchronizing_late: "SyncBatchNorm in a body that takes several passes for a step",
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


def the_leader_breaks(job: Job) -> None:
    """And the other one weighs its next batch with nobody."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, weight=lambda batch: float(len(batch.x))):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 5 and job.rank == 0:
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


class Counting(nn.Linear):
    """It adds up what it has seen."""

    def __init__(self) -> None:
        super().__init__(x.shape[1], 3, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        self.seen += given.detach().sum()
        return super().forward(given)


def a_buffer_of_slices(job: Job) -> None:
    model = job.model(Counting())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DATA, size=24, per_worker=6):
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
    a_buffer_of_slices: "the workers train different models: seen came to differ between steps 0 and 1",
    a_stranger_in_passes: "came to differ",
    gradients_by_hand: "came to differ",
}
"""What only the comparison of replicas finds, the other checks being switched off."""

ALL = {one.__name__: one for one in itertools.chain(REFUSED, PARTED, [the_leader_leaves, the_leader_breaks])}
