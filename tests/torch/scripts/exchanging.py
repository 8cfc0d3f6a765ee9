"""Workers that exchange things, in many ways, right and wrong: `CASE` says which."""

from __future__ import annotations

import os
import time
from pathlib import Path

import outcome
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import stretto.torch as stretto

case = {"kind": "", "pause_s": 0.01, "loops": 3, "per_worker": None, **outcome.CASE}
kind, folder = case["kind"], Path(os.environ["STRETTO_FOLDER"])
job = stretto.join()
model = job.model(outcome.net())
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))

seen: list[float] = []
"""Figures that all workers must agree on, whenever they came."""


def stand(name: str) -> None:
    """Until a file is there; says that it stands."""
    (folder / f"{outcome.WORKER}.{name}").touch()
    while outcome.WORKER != "alone" and not (folder / name).exists():
        time.sleep(0.01)


def train(seed: int) -> None:
    weight = (lambda batch: job.all_reduce(len(batch))) if kind == "weighed" else None
    data, parts = TensorDataset(outcome.x, outcome.y), case["per_worker"]
    for batch in job.batches(data, size=24, seed=seed, per_worker=parts, weight=weight):
        loss = F.cross_entropy(model(batch.x), batch.y)
        if kind == "large":
            wide = job.all_reduce((model(batch.x).mean(0).sum() * torch.ones(70_000, dtype=torch.float64)), "mean")
            loss = loss + wide.mean() * 0.1
        if kind == "summed":
            squares = job.all_reduce({"all": model(batch.x).square().sum(), "rows": len(batch)})
            loss = loss + (squares["all"] / squares["rows"]).sqrt()
        if kind == "whole numbers":
            counted(batch.y)
        if kind == "counting on all":
            assert job.all_reduce(len(batch)) == 24
            everybody = job.all_gather(model(batch.x))
            assert len(everybody) == 24
            loss = loss + everybody.topk(20, dim=0).values.mean()
        if kind == "in any order":
            given = {"one": 1.0, "two": 2.0} if job.rank else {"two": 2.0, "one": 1.0}
            assert job.all_reduce(given, "mean") == {"one": 1.0, "two": 2.0}
        if kind == "stopping" and job.all_reduce(len(batch)) != 24:
            job.stop()
        if batch.step == 5:
            mistake(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(case["pause_s"])


used: list[object] = []
used_again = torch.zeros(3)


def counted(goal: torch.Tensor) -> None:
    """Many whole numbers, their mean, and a tensor that is used again in each pass."""
    many = job.all_reduce(torch.full((40_000,), 2**24 + 1))
    mean = job.all_reduce(torch.full((40_000,), 3).index_fill(0, torch.tensor([0]), 4), "mean")
    used_again.zero_()
    used_again.add_(torch.bincount(goal, minlength=3))
    classes = job.all_reduce(used_again)
    if job.every(1):
        assert many[0].item() % (2**24 + 1) == 0
        assert torch.allclose(mean[:2], torch.tensor([4.0, 3.0], dtype=torch.float64))
        assert classes.sum() == 24


def mistake(loss: torch.Tensor) -> None:
    if kind == "skipped" and job.rank != 1:
        job.all_reduce(loss)
    elif kind == "skipped after others":
        job.barrier()
        if job.rank != 1:
            job.barrier()
    elif kind == "different":
        job.barrier() if job.rank == 1 else job.all_gather(outcome.x[:3])
    elif kind == "of different shapes":
        job.all_reduce(outcome.x[: 2 if job.rank == 1 else 3])
    elif kind == "by the leader alone":
        job.once_per_step(job.barrier)
    elif kind == "gathered in passes":
        job.all_gather(loss.view(1))
    elif kind == "trained through passes":
        (job.all_reduce(loss, "mean") * 2).backward()
    elif kind == "of different keys":
        job.all_reduce({"one": 1, "two" if job.rank == 1 else "three": 2})
    elif kind == "one in another":
        job.all_reduce(lambda: job.all_reduce(1))
    elif kind == "in a child":
        in_a_child()
    elif kind == "a schedule made late":
        used.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    elif kind == "no such operation":
        job.all_reduce(loss, "product")


def in_a_child() -> None:
    """Its error is that of the test."""
    child = os.fork()
    if not child:
        try:
            job.barrier()
        except stretto.TrainingError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    raise SystemExit("the child has ended")


def between(loop: int) -> None:
    if kind == "skipped between" and job.rank != 1:
        job.all_reduce(1)
    if kind == "after the end" and loop == 2:
        if job.rank == 1:
            raise SystemExit(0)
        job.all_reduce(1)
    if kind == "too much between":
        job.all_gather(torch.zeros(200_000, dtype=torch.float64))
    if kind == "standing between" and loop == 1:
        stand("go")
    if kind == "parts":
        seen.append(float(job.all_reduce(lambda: torch.arange(job.rank, 12, job.size).sum())))
        seen.append(float(job.all_gather(lambda: torch.arange(job.rank, 12, job.size)).sum()))
    if kind in ("values", "standing between"):
        found = job.all_reduce({"one": 1, "half": 0.5, "tensor": torch.ones(2)}, "mean")
        seen.extend([found["one"], found["half"], float(found["tensor"].sum()), loop])
        seen.append(job.broadcast(lambda: {"loop": loop, "by": "leader"})["loop"])
        seen.append(float(job.all_reduce(model[0].weight.detach().sum(), "max")))
        job.barrier()
        optimizer.param_groups[0]["lr"] *= 0.8


def attempted(batch: stretto.Batch) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch.x), batch.y)
    loss.backward()
    optimizer.step()
    return loss.item()


if kind == "before":
    job.barrier()
if kind == "between attempts":
    job.attempt(attempted, job.batches(TensorDataset(outcome.x, outcome.y), size=24))
    job.barrier()
if kind == "values in epochs":
    kind = "values"
    for epoch in job.epochs(case["loops"]):
        train(epoch)
        between(epoch)
    seen = []
else:
    for loop in range(case["loops"]):
        train(loop)
        between(loop)
outcome.write(job, [*model.parameters(), torch.tensor(seen, dtype=torch.float64)], seen=len(seen))
