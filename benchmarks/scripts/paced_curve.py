"""A job whose step takes a known time at every size: real processes, reductions and resizes, but the step sleeps.

    paced_curve.py --steps 1500 --step-ms 160,90,60,45 [--then 40,60,80,90 --at 0.5]

`--step-ms` are the milliseconds of a step on 1, 2, 3 … workers; the last one holds beyond. `--then` holds from the
step `--at` (a part of all steps) on.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto


def times(text: str) -> list[float]:
    return [float(word) / 1000 for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "1500")))
    parser.add_argument("--step-ms", type=times, required=True)
    parser.add_argument("--then", type=times, default=None)
    parser.add_argument("--at", type=float, default=0.5)
    parser.add_argument(
        "--marks", default=os.environ.get("MARKS", ""), help="told when the first and last step were done"
    )
    parser.add_argument("--every-step", default=os.environ.get("EVERY_STEP", ""), help="when, and on how many workers")
    options = parser.parse_args()

    torch.manual_seed(0)
    size = 64
    data = TensorDataset(torch.randn(size * options.steps, 4), torch.randn(size * options.steps, 1))
    job = stretto.join()
    model = job.model(nn.Linear(4, 1))
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in job.batches(data, size=size, epochs=1, seed=0):
        table = options.then if options.then and batch.step >= options.at * options.steps else options.step_ms
        due_s = time.monotonic() + table[min(job.size, len(table)) - 1]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch.x), batch.y).backward()
        optimizer.step()
        time.sleep(max(0.0, due_s - time.monotonic()))
        if job.rank == 0 and options.marks and batch.step in (0, options.steps - 1):
            mark(options.marks, f"{time.monotonic()}")
        if job.rank == 0 and options.every_step:
            mark(options.every_step, f"{time.monotonic()} {job.size}")


def mark(path: str, line: str) -> None:
    with open(path, "a") as marks:
        marks.write(f"{line}\n")


if __name__ == "__main__":
    main()
