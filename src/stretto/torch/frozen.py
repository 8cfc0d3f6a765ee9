"""Notices when frozen parameters begin to require gradients inside a loop's body, before they are used.

Sums over the workers are set up for the parameters that require gradients when a batch begins. Fine-tuning scripts
thaw others in the body: the modules that own them are watched, and say so when they are called. Where the model is
compiled, or a parameter is used without its module, nothing is noticed in time; the step is refused then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class Frozen:
    """The modules with frozen parameters, as of the last `watch`; `thawed` is called when one of these has changed."""

    def __init__(self, thawed: Callable[[], None]) -> None:
        self._thawed = thawed
        self._hooks: list[Any] = []

    def watch(self, models: Iterable[nn.Module]) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            module.register_forward_pre_hook(self._look(frozen))
            for module in dict.fromkeys(module for model in models for module in model.modules())
            if (frozen := [own for own in module.parameters(recurse=False) if not own.requires_grad])
        ]

    def _look(self, frozen: list[nn.Parameter]) -> Callable[..., None]:
        def look(*_: Any) -> None:
            if not torch.compiler.is_compiling() and any(own.requires_grad for own in frozen):
                self._thawed()

        return look
