"""Runs a habit or a mistake, by name: `run.py NAME FOLDER`. In a job it is slow until it has seen the faults it is for.

A file `body` or `sum` in the folder asks the worker of rank 1 to die there: in the middle of the loop's body, or while
it adds up gradients with the others. `hurry` says that nothing more will come.
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
import torch

import stretto.torch as stretto
from stretto.torch import frozen, gate
from stretto.torch import job as jobs
from stretto.torch.groups import Group, Pending

PACE_S = 0.05
name, folder = sys.argv[1], Path(sys.argv[2])
in_job = "STRETTO_WORKER" in os.environ


def die_if(sign: str) -> None:
    asked = folder / sign
    if in_job and job.rank == 1 and asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def slowly(settle: Any) -> Any:
    def wrapped(self: jobs.Job) -> bool:
        if in_job and not (folder / "hurry").exists():
            time.sleep(PACE_S)
        found: bool = settle(self)
        return found

    return wrapped


def deadly_backward(backward: Any) -> Any:
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        die_if("body")
        backward(self, *args, **kwargs)

    return wrapped


def deadly_sum(all_reduce: Any) -> Any:
    def wrapped(self: Group, tensor: torch.Tensor) -> Pending:
        found: Pending = all_reduce(self, tensor)
        die_if("sum")
        return found

    return wrapped


if "CHECKS_OFF" in os.environ:
    gate.refuse_strangers = lambda *_: None
    jobs.Job._check_gradients = lambda _: None  # type: ignore[method-assign]
    frozen.Frozen.watch = lambda *_: None  # type: ignore[method-assign]

job = stretto.join()
jobs.Job._settle = slowly(jobs.Job._settle)  # type: ignore[method-assign]
torch.Tensor.backward = deadly_backward(torch.Tensor.backward)  # type: ignore[method-assign]
Group.all_reduce = deadly_sum(Group.all_reduce)  # type: ignore[method-assign]
if name in mistakes.ALL:
    mistakes.ALL[name](job)
else:
    result = importlib.import_module(f"habits.{name}").elastic(job)
    torch.save(result, folder / f"{os.environ.get('STRETTO_WORKER', 'alone')}.pt")
