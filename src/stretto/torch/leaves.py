"""The values that scripts exchange: a tensor, a number, or a mapping, list or tuple of these, as tensors and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.torch.checks import TrainingError


class Leaves:
    """Of one value."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.tensors: list[Tensor] = []
        self.kinds = self._note(value)
        """What it consists of, in words: equal on all workers."""

    def build(self, found: list[Tensor], *, mean: bool) -> Any:
        rest = iter(found)

        def built(like: Any) -> Any:
            if isinstance(like, dict):
                found = {key: built(like[key]) for key in sorted(like, key=repr)}
                return {key: found[key] for key in like}
            if isinstance(like, (list, tuple)):
                return _same_kind(like, [built(item) for item in like])
            one = next(rest)
            if isinstance(like, Tensor):
                return one.to(like.device)
            return float(one) if mean or isinstance(like, (float, np.floating)) else int(one)

        return built(self._value)

    def plain(self) -> Any:
        """The value, without any way back."""
        return _detached(self._value)

    def _note(self, value: Any) -> str:
        if isinstance(value, dict):
            # Filled in any order.
            inner = [f"{key!r}: {self._note(value[key])}" for key in sorted(value, key=repr)]
            return f"{{{', '.join(inner)}}}"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._note(item) for item in value)}]"
        self.tensors.append(_leaf(value))
        return _kind(self.tensors[-1])


def _leaf(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        # Short integers would overflow, and two that are true be one.
        exact = value.is_floating_point() or value.is_complex() or value.dtype == torch.int64
        return value if exact else value.long()
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        return torch.tensor(int(value))
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.double)
    what = f"{value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
    raise TrainingError(f"job.all_reduce() of a {what}", hint="give dense tensors, numbers, or a dict or list of them")


def _detached(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _same_kind(value, [_detached(item) for item in value])
    return value.detach() if isinstance(value, Tensor) else value


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _same_kind(value, [moved(item, device) for item in value])
    return value


def _same_kind(like: Any, items: list[Any]) -> Any:
    """A list, a tuple, or one with names."""
    return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
