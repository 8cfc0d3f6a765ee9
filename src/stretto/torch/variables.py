"""What a script holds in variables of its own, for `stretto check`: nothing of it travels to workers that come later.

Looked at are the variables of the function with the loop, and of its module: numbers, tensors, containers of them,
modules that were not registered, and objects of the script's own classes. Each becomes a few figures.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto.torch.data import Batch, Turn
from stretto.torch.loops import Batches

if TYPE_CHECKING:
    from stretto.torch.job import Job

_OURS = str(Path(__file__).parent.parent) + "/"
_DEPTH = 3
_MOST = 1 << 22
"""Numbers in one variable; what has more is data."""
_PLAIN = (types.ModuleType, types.FunctionType, type, torch.utils.data.Dataset, torch.optim.Optimizer, Batch, Turn)


def own(job: Job) -> dict[str, list[float]]:
    """By name: how many numbers, their sum, and their norm. Called from inside of the loop."""
    frame = _users(sys._getframe())
    if frame is None:
        return {}
    known = {id(part) for model in job.holder.models for part in model.modules()}
    known |= {id(part) for part in (job, *job.holder.extras.values(), *job.holder.helpers())}
    found = {}
    for name, value in {**frame.f_globals, **frame.f_locals}.items():
        if name.startswith("_") or isinstance(value, (*_PLAIN, Batches)) or id(value) in known:
            continue
        with contextlib.suppress(Exception):  # Objects of others may do anything when they are looked at.
            figures = _figures(_numbers(value, known, frame.f_globals.get("__name__", ""), _DEPTH))
            if figures is not None:
                found[name] = figures
    return found


def _users(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost of the script itself."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, "<")) and ("site-packages" not in path or path == main):
            return frame
        frame = frame.f_back
    return None


def _numbers(value: Any, known: set[int], module: str, depth: int) -> Iterator[Tensor]:
    if isinstance(value, (bool, int, float)):
        yield torch.tensor([float(value)], dtype=torch.float64)
    elif isinstance(value, Tensor):
        yield value.detach()
    elif depth <= 0 or id(value) in known:
        return
    elif isinstance(value, nn.Module):
        for part in (*value.parameters(), *value.buffers()):
            yield part.detach()
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _numbers(inner, known, module, depth - 1)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield torch.tensor([float(len(value))], dtype=torch.float64)
        for inner in value:
            yield from _numbers(inner, known, module, depth - 1)
    elif type(value).__module__ == module:
        yield from _numbers(vars(value), known, module, depth - 1)


def _figures(numbers: Iterator[Tensor]) -> list[float] | None:
    """None of what is no number, and of too many of them."""
    count, total, squares = 0, 0.0, 0.0
    for some in numbers:
        if some.layout != torch.strided:
            return None
        count += some.numel()
        if count > _MOST:
            return None
        wide = some.abs().double() if some.is_complex() else some.double()
        total += float(wide.sum())
        squares += float(wide.square().sum())
    return [float(count), _finite(total), _finite(math.sqrt(squares))] if count else None


def _finite(value: float) -> float:
    """JSON has no infinity."""
    return value if math.isfinite(value) else math.copysign(1e300, value) if value == value else 2e300
