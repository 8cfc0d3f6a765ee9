"""Runs a habit or a mistake, by name: `run.py NAME FOLDER`. In a job it is slow until it has seen the faults it is for.

A file `body-w1`, `sum-w1` or `exchange-w1` in the folder asks the worker w1 to die there: in the middle of the loop's
body, while it adds up gradients with the others, or as it exchanges something else with them. `hurry` says up to which
step nothing will happen; empty, that nothing more will come. A habit with several backward passes in one body says by
`DIES_IN` which of them is struck. The variable WITHOUT names a check, or a mechanism, that is switched off.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mistakes
import switching
import torch
import unchecked

import stretto.torch as stretto
from stretto.torch import job as jobs
from stretto.torch.groups import Group, Pending

PACE_S = float(os.environ.get("PACE_S", "0.05"))
LOOK_S = 0.005
name, folder = sys.argv[1], Path(sys.argv[2])
in_job = "STRETTO_WORKER" in os.environ
habit = unchecked.ALL.get(name)
if habit is None and name not in mistakes.ALL:
    habit = importlib.import_module(f"habits.{name}")
dies_in = getattr(habit, "DIES_IN", 1)
backwards = [0]
"""In this pass through the body."""


def die_if(sign: str) -> None:
    asked = folder / f"{sign}-{os.environ.get('STRETTO_WORKER')}"
    if in_job and (sign == "exchange" or backwards[0] == dies_in) and asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def hurries(step: int) -> bool:
    asked = folder / "hurry"
    return asked.exists() and step < int(asked.read_text() or sys.maxsize)


def slowly(settle: Any) -> Any:
    def wrapped(self: jobs.Job) -> bool:
        end_s = time.monotonic() + PACE_S
        while in_job and not hurries(self.step) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        found: bool = settle(self)
        return found

    return wrapped


def counting(feed: Any) -> Any:
    def wrapped(self: jobs.Job, *args: Any, **kwargs: Any) -> None:
        backwards[0] = 0
        feed(self, *args, **kwargs)

    return wrapped


def deadly_backward(backward: Any) -> Any:
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        backwards[0] += 1
        die_if("body")
        backward(self, *args, **kwargs)

    return wrapped


def deadly_sum(all_reduce: Any) -> Any:
    def wrapped(self: Group, tensor: torch.Tensor) -> Pending:
        found: Pending = all_reduce(self, tensor)
        die_if("sum")
        return found

    return wrapped


def deadly_exchange(gather: Any) -> Any:
    def wrapped(self: Group, *args: Any) -> Any:
        die_if("exchange")
        return gather(self, *args)

    return wrapped


switching.OFF[os.environ.get("WITHOUT", "nothing")]()
job = stretto.join()
jobs.Job._settle = slowly(jobs.Job._settle)  # type: ignore[method-assign]
jobs.Job._feed = counting(jobs.Job._feed)  # type: ignore[method-assign]
torch.Tensor.backward = deadly_backward(torch.Tensor.backward)  # type: ignore[method-assign]
Group.gather_beside = deadly_exchange(Group.gather_beside)  # type: ignore[method-assign]
Group.all_reduce = deadly_sum(Group.all_reduce)  # type: ignore[method-assign]
if habit is None:
    mistakes.ALL[name](job)
else:
    result = habit.elastic(job)
    (folder / "steps").write_text(str(job.step))
    torch.save(result, folder / f"{os.environ.get('STRETTO_WORKER', 'alone')}.pt")
