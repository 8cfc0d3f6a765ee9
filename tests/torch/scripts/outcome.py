"""What the scripts of real trainings share: some data, and their result in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stretto.torch import Job

WORKER = os.environ.get("STRETTO_WORKER", "alone")
CASE: dict[str, Any] = json.loads(os.environ.get("CASE", "{}"))

torch.manual_seed(7)
_generator = torch.Generator().manual_seed(1)
x = torch.randn(240, 6, generator=_generator, dtype=torch.float64)
y = torch.randint(0, 3, (240,), generator=_generator)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).double()


def pause(job: Job) -> None:
    """Stands for the time that a larger model takes: long enough that the third worker is in before the end."""
    global _grown
    _grown = _grown or job.size > 2
    time.sleep(0.004 if _grown or WORKER == "alone" else 0.1)


_grown = False


def write(job: Job, exact: Iterable[Tensor], *, loose: Iterable[Tensor] = (), **facts: Any) -> None:
    """`exact` must not depend on the number of workers but for the order of additions, `loose` only within its type."""
    result = {"steps": job.step, "exact": _flat(exact), "loose": _flat(loose), "facts": facts}
    Path(os.environ["STRETTO_FOLDER"], f"{WORKER}.result").write_text(json.dumps(result))


def _flat(tensors: Iterable[Tensor]) -> list[float]:
    return [value for tensor in tensors for value in tensor.detach().double().reshape(-1).tolist()]
