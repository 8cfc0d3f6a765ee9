"""A small training whose result does not depend on how many workers did it; options are in the variable CASE.

For the faults that a check must find, `mutate` spoils one step in the middle of the first loop on the worker of rank 0:
`drop` and `double` leave the last sample of its slice out or feed it twice, where slices are cut, so that the ledger of
what was fed says so; `silent drop` and `silent double` do the same to the tensors behind the ledger's back.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.torch import transfer
from stretto.torch.data import Part
from stretto.torch.plan import Plan

case: dict[str, Any] = {"samples": 240, "size": 24, "epochs": 8, "per_worker": None, "loops": 1, "workers": 0}
case |= {"pause_s": 0.0, "linger": 1, "transfer_s": 0.0, "bitwise": False, "mutate": ""}
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


def fed(batch: Any) -> tuple[Tensor, Tensor]:
    """What the model really gets."""
    x, y = batch
    if job.rank == 0 and job.step == steps // 2:
        if case["mutate"] == "silent drop":
            return x[:-1], y[:-1]
        if case["mutate"] == "silent double":
            return torch.cat([x, x[-1:]]), torch.cat([y, y[-1:]])
    return x, y


def pause(place: int) -> None:
    """Stands for the time that a larger model takes, here or there in the body, until the test is in a hurry."""
    if case["pause_s"] and job.step % 3 == place and not (folder / "hurry").exists():
        time.sleep(case["pause_s"] * (case["linger"] if job.step > total // 2 else 1))


def weights() -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


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
    net: nn.Module = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
    x = x.float()
else:
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double()
model = job.model(net)
optimizer = job.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.8)
course: dict[int, float] = {}
for loop in range(case["loops"]):
    for batch in job.batches(
        TensorDataset(x, y),
        size=case["size"],
        epochs=case["epochs"],
        seed=loop,
        per_worker=case["per_worker"],
        workers=case["workers"],
    ):
        course[job.step] = float(torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).norm())
        if job.step == total - 1:
            (folder / "ending").touch()
        inputs, targets = fed(batch)
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        pause(0)
        loss.backward()
        pause(1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        job.report(loss=loss)
        pause(2)

if "STRETTO_FOLDER" in os.environ:
    result = {"steps": job.step, "last_epoch": scheduler.last_epoch, "weights": weights().tolist(), "course": course}
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(json.dumps(result))
    unfinished.replace(folder / f"{name}.result")
