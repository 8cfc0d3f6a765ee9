"""A scaler that skips steps, autocast, models in half precision, several schedulers on one optimizer; early stop."""

from __future__ import annotations

import outcome
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import stretto.torch as stretto

job = stretto.join()
model = job.model(outcome.net())
cast = job.model(outcome.net().float())
halves = [job.model(outcome.net()) for _ in range(2)]
halves[0].to(torch.bfloat16)
halves[1].half()
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
lower = job.optimizer(torch.optim.SGD([p for m in (cast, *halves) for p in m.parameters()], lr=0.05))
warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
main = lr_scheduler.CosineAnnealingLR(optimizer, 100)
scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, main], milestones=[20])
plateau = lr_scheduler.ReduceLROnPlateau(lower, factor=0.5, patience=7)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=9)
data = TensorDataset(outcome.x, outcome.y, torch.arange(240))
for batch in job.batches(data, size=24, epochs=20, seed=1, per_worker=outcome.CASE["per_worker"]):
    given, target, index = batch
    loss = F.cross_entropy(model(given), target)
    if batch.epoch % 2 and (index == 7).any():
        loss = loss * float("inf")  # on whichever worker has this sample
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others = F.cross_entropy(cast(given.float()), target)
    for half in halves:
        others = others + F.cross_entropy(half(given.to(half[0].weight.dtype)).float(), target)
    optimizer.zero_grad()
    lower.zero_grad()
    (scaler.scale(loss) + others).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    lower.step()
    scaler.update()
    scheduler.step()
    plateau.step(1.0)
    if job.step == 60:
        job.stop()
    outcome.pause(job)
outcome.write(
    job,
    model.state_dict().values(),
    loose=[tensor for m in (cast, *halves) for tensor in m.state_dict().values()],
    scale=scaler.get_scale(),
    rates=[optimizer.param_groups[0]["lr"], lower.param_groups[0]["lr"]],
    at=[scheduler.last_epoch, plateau.last_epoch],
    types=[str(half[0].weight.dtype) for half in halves],
)
