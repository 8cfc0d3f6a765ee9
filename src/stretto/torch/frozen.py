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

    def watch(self, models: Iterable[nn.Module], known: Trained) -> None:
        """Those that are `known` need not be waited for."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            module.register_forward_pre_hook(_Look(frozen, self._thawed))
            for module in dict.fromkeys(module for model in models for module in model.modules())
            if (
                frozen := [
                    own
                    for own in module.parameters(recurse=False)
                    if not own.requires_grad and id(own) not in known.ids
                ]
            )
        ]


class _Look:
    """The hook on a module. A model that is written to a file leaves it behind."""

    def __init__(self, frozen: list[nn.Parameter], thawed: Callable[[], None]) -> None:
        self._frozen, self._thawed = frozen, thawed

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and any(own.requires_grad for own in self._frozen):
            self._thawed()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Look, ([], _nothing)


def _nothing() -> None:
    pass


class Trained:
    """Parameters that were trained in this loop, by identity: sums stay set up for them, so that a net that is frozen
    and thawed in every batch costs nothing. Part of the state, since all members must set up the same sums."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self.version = 0

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        new = {id(given) for given in parameters} - self.ids
        if new:
            self.put(self.ids | new)

    def put(self, ids: set[int]) -> None:
        if ids != self.ids:
            self.ids, self.version = ids, self.version + 1
