"""A small training whose result does not depend on how many workers did it; options are in the variable CASE.

For the faults that a check must find, `mutate` spoils one step in the middle of the first loop on the worker of rank 0:
`drop` and `double` leave the last sample of its slice out or feed it twice, where slices are cut, so that the ledger of
what was fed says so; `silent drop` and `silent double` do the same to the tensors behind the ledger's back.

`body` is how the loop is written: `plain`, `phases` (three steps on each batch, by two optimizers), `attempt`,
`collectives` (exchanges before and after the step, in the loss and after each loop), `steps` (`job.steps`, with rows by
place) or `syncnorm`. With `dies_in` the worker of rank 1 dies in that step, in the sum of that phase.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.runtime.order import Loop, Order
from stretto.torch import Batch, transfer
from stretto.torch.data import Part, Turn
from stretto.torch.groups import Group
from stretto.torch.plan import Plan

case: dict[str, Any] = {"samples": 240, "size": 24, "epochs": 8, "per_worker": None, "loops": 1, "workers": 0}
case |= {"pause_s": 0.0, "linger": 1, "transfer_s": 0.0, "bitwise": False, "mutate": "", "body": "plain", "dies_in": []}
case |= json.loads(os.environ.get("CASE", "{}"))
folder = Path(os.environ.get("STRETTO_FOLDER", "."))
name = os.environ.get("STRETTO_WORKER", "alone")
steps = -(-case["samples"] // case["size"]) * case["epochs"]
total = steps * case["loops"]
faulthandler.register(signal.SIGUSR1)  # tells where a schedule that does not end stands


def slow_transfers(seconds: float) -> None:
    """State takes so long to travel, and shows that it is on its way."""
    send, sign = transfer._to_all, folder / f"{name}.sending"

    def slowly(*given: Any) -> None:
        sign.touch()
        time.sleep(seconds / 3)  # the description, the small tensors and the verdict
        send(*given)
        sign.unlink()

    transfer._to_all = slowly


def wrong_cuts() -> None:
    right = Plan.parts

    def wrong(plan: Plan, step: int, place: int, places: int) -> list[Part]:
        parts = right(plan, step, place, places)
        if place == 0 and step == steps // 2 and plan.loop.seed == 0:
            last = parts[-1]
            spoilt = last.indices[:-1] if case["mutate"] == "drop" else (*last.indices, last.indices[-1])
            parts[-1] = last._replace(indices=spoilt, share=last.share * len(spoilt) / len(last.indices))
        return parts

    Plan.parts = wrong  # type: ignore[method-assign]


class Memory:
    """What the workers found together after the step before: the next one depends on it."""

    def __init__(self) -> None:
        self.loss = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


def fed(batch: Any) -> tuple[Tensor, Tensor]:
    """What the model really gets."""
    x, y = made(batch) if isinstance(batch, Turn) else batch
    if job.rank == 0 and job.step == steps // 2:
        if case["mutate"] == "silent drop":
            return x[:-1], y[:-1]
        if case["mutate"] == "silent double":
            return torch.cat([x, x[-1:]]), torch.cat([y, y[-1:]])
    return x, y


def made(turn: Turn) -> tuple[Tensor, Tensor]:
    """The rows of a place: together all places of a step have a global batch."""
    rows = orders[turn_loop].indices(turn.step)[turn.place :: turn.places]
    return x[rows], y[rows]


def pause(place: int) -> None:
    """Stands for the time that a larger model takes, here or there in the body, until the test is in a hurry."""
    if case["pause_s"] and job.step % 3 == place and not (folder / "hurry").exists():
        time.sleep(case["pause_s"] * (case["linger"] if job.step > total // 2 else 1))


def weights() -> Tensor:
    """Everything that was learned, and agreed on after a loop."""
    held = [t.detach().double().reshape(-1) for m in job.holder.models for t in m.state_dict().values()]
    return torch.cat([*held, torch.tensor(agreed, dtype=torch.float64)])


def learn(batch: Batch) -> Tensor:
    """The body of the plain loop."""
    inputs, targets = fed(batch)
    found = model(inputs)
    loss = F.cross_entropy(found, targets)
    if isinstance(batch, Turn):
        loss = F.cross_entropy(found, targets, reduction="sum") / (case["size"] / batch.places)
    if case["body"] == "collectives":
        loss = compared(found, loss)
    optimizer.zero_grad()
    pause(0)
    loss.backward()
    pause(1)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if case["body"] != "attempt":
        scheduler.step()
    if case["body"] == "collectives":
        whole = job.all_reduce(loss.item(), "mean")
        if batch.last:
            memory.loss = whole
    job.report(loss=loss)
    pause(2)
    return loss.detach()


def compared(found: Tensor, loss: Tensor) -> Tensor:
    """A loss over the rows of all workers, weighed by what they exchange; of a pass among several less is possible."""
    whole = job.all_reduce(loss.detach(), "mean")
    if not case["bitwise"]:
        everybody = job.all_gather(found)
        tilt = job.broadcast(lambda: {"tilt": 0.01 * (job.step % 5)})["tilt"]
        spread = job.all_reduce(found.square().mean(0), "mean").sum()
        loss = loss + tilt * everybody.var(0).mean() + 0.01 * spread
        job.barrier()
        # Of a step in several passes it is whole in the last one only.
        loss = loss * (1 + 0.1 * whole)
    return loss * (1 + 0.1 * memory.loss)


def judged() -> Tensor:
    """This worker's part of the loss over all samples; where bits count, of how many are right."""
    own = slice(job.rank, None, job.size)
    model.eval()
    with torch.no_grad():
        found = model(x[own])
    model.train()
    if case["bitwise"]:
        return (found.argmax(1) == y[own]).sum().double()
    return F.cross_entropy(found, y[own], reduction="sum")


def agree(loop: int) -> None:
    """After a loop: functions, of which each worker has a part, and values that are alike on all."""
    total = float(job.all_reduce(judged)) / case["samples"]
    rows = job.all_gather(lambda: torch.arange(job.rank, 12, job.size, dtype=torch.float64))
    told = job.broadcast(lambda: {"loop": loop, "total": total})
    job.barrier()
    agreed.extend([total, float(rows.sum()), float(told["loop"]), job.all_reduce(told["total"], "max")])
    optimizer.param_groups[0]["lr"] *= 1 - 0.1 * total


def judging(batch: Batch) -> None:
    """Another net learns what the model says, as it is now."""
    inputs, targets = fed(batch)
    loss = F.cross_entropy(judge(model(inputs).detach()), targets)
    judges.zero_grad()
    loss.backward()
    pause(1)
    judges.step()


def please(batch: Batch) -> None:
    """The model learns from the other net."""
    inputs, targets = fed(batch)
    loss = F.cross_entropy(judge(model(inputs)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def body(batch: Batch) -> Any:
    course[job.step] = float(torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).norm())
    if job.step == total - 1:
        (folder / "ending").touch()
    return learn(batch) if case["body"] != "phases" else job.phases(batch, learn, judging, please)


def attempts(batches: Iterator[Batch]) -> None:
    """As a trainer that counts for itself, and changes the rate between steps."""
    count = None
    while job.attempt(body, batches) is not None:
        scheduler.step()
        count = job.step if count is None else count + 1
        assert count == job.step, f"{count} steps were counted, {job.step} applied"


def die_in(step: int, phase: int) -> None:
    """As a worker that is lost while the others wait for it."""
    reduce, gather = Group.all_reduce, Group.all_gather_now

    def deadly(call: Any) -> Any:
        def wrapped(self: Group, tensor: Tensor) -> Any:
            here = job.step == step and job.rank == 1 and job._phases.number == phase
            if here and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, tensor)

        return wrapped

    Group.all_reduce, Group.all_gather_now = deadly(reduce), deadly(gather)  # type: ignore[method-assign]


if case["transfer_s"]:
    slow_transfers(case["transfer_s"])
if case["mutate"] in ("drop", "double"):
    wrong_cuts()

torch.manual_seed(7)
generator = torch.Generator().manual_seed(1)
x = torch.randn(case["samples"], 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (case["samples"],), generator=generator)

job = stretto.join(consistency="bitwise" if case["bitwise"] else None, virtual_ranks=8)
if case["bitwise"]:
    net = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
    x = x.float()
else:
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double()
if case["body"] == "syncnorm":
    net.insert(1, nn.SyncBatchNorm(24).double())
model = job.model(net)
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
if case["body"] == "phases":
    judge = job.model(nn.Linear(3, 3).to(x.dtype))
    judges = job.optimizer(torch.optim.Adam(judge.parameters(), lr=0.01))
if case["dies_in"]:
    die_in(*case["dies_in"])
if case["body"] == "collectives":
    memory = job.keep("memory", Memory())
agreed: list[float] = []
course: dict[int, float] = {}
loops = [
    Loop(samples=case["samples"], size=case["size"], epochs=case["epochs"], seed=loop) for loop in range(case["loops"])
]
orders, turn_loop = [Order(loop) for loop in loops], 0
for loop in range(case["loops"]):
    turn_loop = loop
    batches: Iterator[Any] = (
        job.steps(steps, seed=loop)
        if case["body"] == "steps"
        else job.batches(
            TensorDataset(x, y),
            size=case["size"],
            epochs=case["epochs"],
            seed=loop,
            per_worker=case["per_worker"],
            workers=case["workers"],
        )
    )
    if case["body"] == "attempt":
        attempts(batches)
    else:
        for batch in batches:
            body(batch)
    if case["body"] == "collectives":
        agree(loop)

if "STRETTO_FOLDER" in os.environ:
    result = {"steps": job.step, "last_epoch": scheduler.last_epoch, "weights": weights().tolist(), "course": course}
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(result))
    unfinished.replace(folder / f"{name}.result")
