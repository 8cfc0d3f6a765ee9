"""examples/habits/tensorboard_curve.py, slower, and with a leader that can be told to die: `before-w0` in the job's
folder, just before it writes, `after-w0`, when it has written; `hurry` lets it go."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from stretto.torch.job import Job

folder = Path(os.environ.get("STRETTO_FOLDER", "."))
add_scalar, flush, settle = SummaryWriter.add_scalar, SummaryWriter.flush, Job._settle


def die_if(sign: str) -> None:
    asked = folder / f"{sign}-{os.environ.get('STRETTO_WORKER')}"
    if asked.exists():
        asked.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def deadly_add(self: SummaryWriter, *args: Any) -> None:
    die_if("before")
    add_scalar(self, *args)


def deadly_flush(self: SummaryWriter) -> None:
    flush(self)
    die_if("after")


def slowly(self: Job) -> bool:
    if self.world is not None and not (folder / "hurry").exists():
        time.sleep(0.03)
    return settle(self)


SummaryWriter.add_scalar = deadly_add  # type: ignore[method-assign]
SummaryWriter.flush = deadly_flush  # type: ignore[method-assign]
Job._settle = slowly  # type: ignore[method-assign]
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
