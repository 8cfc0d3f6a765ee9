"""Scripts that would train another model than they say, each in its own way: they are refused, by hand and elastic."""

from __future__ import annotations

import copy
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import net, x, y
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

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


def an_early_end(job: Job) -> None:
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=5):
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 25:
            raise SystemExit(0)


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


def a_part_without_a_state(job: Job) -> None:
    _registered(job)
    job.keep("best", {"loss": 1e9})


def no_samples(job: Job) -> None:
    """A filter that leaves nothing."""
    model, optimizer = _registered(job)
    for batch in job.batches(Subset(DATA, []), size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


class Tempered(nn.Module):
    """Its temperature falls with every forward pass."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        self.passes += 1
        found: Tensor = self.inner(given) / (1 + 9 * torch.exp(-self.passes / 40))
        return found


def a_buffer_in_every_pass(job: Job) -> None:
    """A temperature that falls with every forward pass, of which a step takes fewer on more workers."""
    model = job.model(Tempered())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DATA, size=24, per_worker=5):
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


def gone_through_twice(job: Job) -> None:
    """As a DataLoader may be."""
    model, optimizer = _registered(job)
    loader = job.batches(DATA, size=24)
    for _ in range(3):
        for batch in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.x), batch.y).backward()
            optimizer.step()


def a_net_of_its_own(job: Job) -> None:
    """A learned loss that the job knows nothing of, neither the net nor its optimizer."""
    model, optimizer = _registered(job)
    judge = nn.Linear(3, 3).double()
    other = torch.optim.SGD(judge.parameters(), lr=0.1)
    for batch in job.batches(DATA, size=24):
        optimizer.zero_grad()
        other.zero_grad()
        F.cross_entropy(judge(model(batch.x)), batch.y).backward()
        optimizer.step()
        other.step()


def an_average_that_begins_late(job: Job) -> None:
    """In every pass, but not in the first steps."""
    model, optimizer = _registered(job)
    average = job.keep("average", _Average(net(8)))
    for batch in job.batches(DATA, size=24, per_worker=5, epochs=60):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step >= 5:
            average.update(model)


def another_thread(job: Job) -> None:
    """It takes the batches, one ahead."""
    model, optimizer = _registered(job)
    ready: queue.Queue[Batch | None] = queue.Queue(maxsize=1)

    def take() -> None:
        for batch in job.batches(DATA, size=24):
            ready.put(batch)
        ready.put(None)

    threading.Thread(target=take, daemon=True).start()
    while (batch := ready.get()) is not None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


REFUSED = {
    gone_through_twice: "a loop of batches() or steps() was gone through a second time",
    a_net_of_its_own: "SGD trains parameters that no model of the job has, from batch to batch",
    an_average_that_begins_late: "the part 'average' changed in a pass through the body that is not the last",
    another_thread: "one thread takes batches from the loop, and another one trains on them",
    a_stranger_steps: "SGD steps on parameters of the job, but was not registered",
    gradients_by_hand: "step() was called on gradients that came from no backward pass of this batch",
    a_plain_loop: "SGD was asked to step outside of the job's loops",
    phases_in_passes: "a backward pass follows a step() in one body",
    phases_in_accumulation: "a backward pass follows a step() in one body",
    an_early_end: "the script ended inside its loop, at step 26 of 50",
    an_early_exit: "the script ended inside its loop, at step 26 of 50",
    wrapped_in_ddp: "the model is wrapped in DistributedDataParallel",
    a_distributed_sampler: "a DistributedSampler gives each worker a slice of its own",
    a_stream: "a Stream has no length: batches() must know every sample by its index",
    a_closure: "LBFGS.step() was given a closure: it would evaluate the model several times in one step",
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
    a_part_without_a_state: "the part 'best' is a dict: it has no state_dict() and load_state_dict()",
    no_samples: "the dataset has no samples",
    a_buffer_in_every_pass: "passes changes in every forward pass, and with more workers a step takes fewer of them",
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


def parting_as_it_breaks(job: Job) -> None:
    """One worker's weights are changed in the very step in which all leave the loop."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=9):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if batch.step == 60:
            if job.rank == 1:
                model[2].bias.data[3] += 1e-9
            break


class Mean:
    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def a_mean_of_slices(job: Job) -> None:
    """A kept part that each worker fills from its own samples, and that weighs the loss."""
    model, optimizer = _registered(job)
    mean = job.keep("mean", Mean())
    for batch in job.batches(DATA, size=24, epochs=3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x), batch.y)
        (loss * (1 + mean.value)).backward()
        optimizer.step()
        mean.value = 0.9 * mean.value + 0.1 * loss.item()


PARTED = {
    parting_as_it_breaks: "the workers train different models: 2.bias came to differ between steps",
    a_mean_of_slices: "the workers train different models: the part 'mean' came to differ",
    a_local_decision: "came to differ",
    a_rank_of_its_own: "the workers train different models: 2.bias came to differ",
    thawing: "the workers train different models: 0.weight, 0.bias came to differ between",
    a_buffer_of_slices: "the workers train different models: seen came to differ between steps 0 and 1",
    a_stranger_in_passes: "came to differ",
    gradients_by_hand: "came to differ",
}
"""What only the comparison of replicas finds, the other checks being switched off."""


def a_weight_that_grows(job: Job) -> None:
    """By a variable of the script, which begins anew in a worker that comes later."""
    model, optimizer = _registered(job)
    beta = 0.0
    for batch in job.batches(DATA, size=24, epochs=20):
        beta = min(1.0, beta + 0.05)
        optimizer.zero_grad()
        found = model(batch.x)
        (F.cross_entropy(found, batch.y) + beta * found.square().mean()).backward()
        optimizer.step()


class Cooling(nn.Module):
    """It counts how often it was used, for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heat = net(), 2.0

    def forward(self, given: Tensor) -> Tensor:
        self.heat = max(0.5, self.heat * 0.95)
        found: Tensor = self.inner(given) / self.heat
        return found


def a_count_in_the_model(job: Job) -> None:
    model = job.model(Cooling())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in job.batches(DATA, size=24, epochs=20):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def an_own_target(job: Job) -> None:
    """Copied from the model every twelve steps, and not registered."""
    model, optimizer = _registered(job)
    target = copy.deepcopy(model).requires_grad_(False)
    for batch in job.batches(DATA, size=24, epochs=20):
        if batch.step % 12 == 1:
            target.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        (F.cross_entropy(model(batch.x), batch.y) + F.mse_loss(model(batch.x), target(batch.x))).backward()
        optimizer.step()


def numbers_of_its_own(job: Job) -> None:
    """A generator that nobody seeds for each step."""
    model, optimizer = _registered(job)
    chance = torch.Generator().manual_seed(3)
    for batch in job.batches(DATA, size=24, epochs=20):
        noise = torch.randn(batch.x.shape, generator=chance, dtype=torch.float64)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x + 0.3 * noise), batch.y).backward()
        optimizer.step()


def one_batch_ahead(job: Job) -> None:
    """As those do that copy to a GPU meanwhile; and the last one is left out."""
    model, optimizer = _registered(job)
    before = None
    for batch in job.batches(DATA, size=24, epochs=20):
        if before is not None:
            optimizer.zero_grad()
            F.cross_entropy(model(before[0]), before[1]).backward()
            optimizer.step()
        before = batch.x, batch.y


def a_loop_that_is_shorter(job: Job) -> None:
    """Of as many samples as a worker has learned from, which comes after the last step that it then knows of."""
    model, optimizer = _registered(job)
    known = 240 if job.leader else 48
    for batch in job.batches(Subset(DATA, range(known)), size=24, epochs=20):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def zipped(job: Job) -> None:
    """So many steps, counted by another iterator."""
    model, optimizer = _registered(job)
    for _, batch in zip(range(150), job.batches(DATA, size=24, epochs=20), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


GROWN = (a_weight_that_grows, a_count_in_the_model, an_own_target, numbers_of_its_own, one_batch_ahead)
"""Right by hand, and at any size; a worker that comes later does something else."""
OTHER_DATA = (a_loop_that_is_shorter,)
"""And this one would go through another loop."""


def masks_of_a_collator(job: Job) -> None:
    """Drawn as samples are put together, as for masked language models: no mistake."""
    model, optimizer = _registered(job)

    def masked(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        given = torch.stack([one for one, _ in samples])
        return given * (torch.rand(given.shape) > 0.2), torch.stack([wanted for _, wanted in samples])

    for batch in job.batches(DATA, size=24, epochs=20, collate=masked):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


def an_environment_that_plays_on(job: Job) -> None:
    """What it has played before decides what comes: each worker has its own, which is no mistake either."""
    model, optimizer = _registered(job)
    state = torch.zeros(6, dtype=torch.float64)
    for turn in job.steps(200):
        generator = torch.Generator().manual_seed(turn.seed)
        state = 0.9 * state + torch.randn(8, 6, dtype=torch.float64, generator=generator).mean(0)
        optimizer.zero_grad()
        model(state).square().sum().backward()
        optimizer.step()


def an_end_in_rounding(job: Job) -> None:
    """The fit is perfect from the start: gradients are what rounding leaves, and never twice the same."""
    torch.manual_seed(7)
    model = job.model(nn.Linear(6, 3).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    with torch.no_grad():
        fitted = TensorDataset(x, torch.stack([model(one) for one in x]))
    for batch in job.batches(fitted, size=24, epochs=20):
        order = torch.randperm(len(batch.x), generator=torch.Generator().manual_seed(time.monotonic_ns()))
        optimizer.zero_grad()
        F.mse_loss(model(batch.x[order]), batch.y[order]).backward()
        optimizer.step()


HARMLESS = (masks_of_a_collator, an_environment_that_plays_on, an_end_in_rounding)
"""Where a worker that comes later may do something else."""


def as_many_backwards_as_parts(job: Job) -> None:
    """The samples of a slice in parts of eight, by hand: some workers have one, others two."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=17):
        optimizer.zero_grad()
        for some, wanted in zip(batch.x.split(8), batch.y.split(8), strict=True):
            (F.cross_entropy(model(some), wanted) * (len(some) / len(batch))).backward()
        optimizer.step()


def another_backward_of_one(job: Job) -> None:
    """In a step in which nothing is compared."""
    model, optimizer = _registered(job)
    for batch in job.batches(DATA, size=24, epochs=30):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        if batch.step == 100 and job.rank == 1:
            (0 * model(batch.x).sum()).backward()
        optimizer.step()


def a_vocabulary_of_a_set(job: Job) -> None:
    """Words are numbered in the order of a set, which is another one in every process."""
    model = job.model(nn.EmbeddingBag(20, 3).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    words = [f"word {i}" for i in range(20)]
    numbers = dict(
        zip(words, torch.randperm(20, generator=torch.Generator().manual_seed(os.getpid())).tolist(), strict=True)
    )
    data = torch.tensor([[numbers[words[(i * k) % 20]] for k in range(1, 6)] for i in range(240)])
    for batch in job.batches(TensorDataset(data, y), size=24):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()


UNLIKE = {
    as_many_backwards_as_parts: "the workers wait for each other in different exchanges",
    another_backward_of_one: "some workers called backward() more often than others",
    a_vocabulary_of_a_set: "the workers of the job differ in loop 0",
}
"""What several workers cannot do, and one can."""

ALL = {
    one.__name__: one
    for one in itertools.chain(
        REFUSED, PARTED, GROWN, OTHER_DATA, HARMLESS, UNLIKE, [zipped, the_leader_leaves, the_leader_breaks]
    )
}
