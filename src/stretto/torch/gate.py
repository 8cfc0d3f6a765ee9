"""Where a user's calls are let through, or not: optimizer, scheduler and scaler while a batch is done in parts.

A batch may take several passes through the loop's body (micro-batches), and may have to be done again. So `step` of
everything counts only in the last pass, and only if the gradient of the whole batch arrived. Schedulers and scalers are
noted as they are made, so that scripts need not register them. An optimizer that was not registered would step in every
pass, on whatever gradient there is: it is refused, and so is a step outside of a loop.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.torch import checks
from stretto.torch.state import Holder, Stateful

_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Schedulers and scalers, numbered as they were made."""


class Gate:
    """Open or closed, by the pass through the body and by what became of the gradient."""

    def __init__(self) -> None:
        self.first = self.last = True
        self.inside = False
        self.passes = 0
        """Through a body, or a phase of it, so far."""
        self.arrived: Callable[[], bool] = lambda: True
        """Whether the gradient of the whole batch is there."""
        self.steps = 0
        """Optimizer steps in this batch."""
        self.asked = False
        """Whether anybody wanted to step in the last pass."""
        self.asked_here = False
        """Whether anybody wanted to step in this pass."""
        self.stepping = False
        """A registered optimizer is at it."""
        self.stepped: set[int] = set()
        """Optimizers that stepped in this batch, by identity."""
        self.wanted: Callable[[], None] = lambda: None
        """Called when anybody wants to step, now or not; may raise."""
        self.waiting: Callable[[], bool] = lambda: False
        """Whether gradients of a loop that has ended wait for a step."""

    def begin(self, first: bool, last: bool) -> None:
        """A pass through the body begins."""
        self.first, self.last, self.inside, self.asked_here = first, last, True, False
        self.passes += 1
        if first:
            self.steps, self.asked, self.stepped = 0, False, set()

    def end(self) -> None:
        """The last pass is over: outside of a batch all but optimizers are let through, whatever became of it."""
        self.inside = False

    @property
    def steps_now(self) -> bool:
        return not self.inside or (self.last and self.arrived())


def optimizer(given: torch.optim.Optimizer, gate: Gate, before: Callable[[], None]) -> None:
    """Put the optimizer behind the gate; `before` is called before a step, and may find that the gate must close."""
    step = given.step

    def gated_step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        gate.wanted()
        if not gate.inside and not gate.waiting():
            raise checks.step_outside(type(given).__name__)
        gate.asked |= gate.last
        gate.asked_here = True
        if not gate.steps_now:
            return None
        if closure is not None:
            raise checks.closure(type(given).__name__)
        before()
        if not gate.steps_now:
            return None
        gate.steps += 1
        gate.stepped.add(id(given))
        gate.stepping = True
        try:
            return step()
        finally:
            gate.stepping = False

    if hasattr(step, "_wrapped_by_lr_sched"):
        # A scheduler that was made before looks for its mark, and warns where it has gone.
        gated_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    given.step = types.MethodType(gated_step, given)  # type: ignore[method-assign]


def let_go(given: torch.optim.Optimizer) -> None:
    """It is no optimizer of the job any more."""
    given.__dict__.pop("step", None)


def refuse_strangers(holder: Holder, gate: Gate) -> None:
    """Let no optimizer change a model of the job that the job does not know; one that is part of a registered one may,
    while that steps. Nor may one train anything else from batch to batch: one that is made in the body, and lives in
    one pass of it (for an adversarial example), may."""
    met: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def look(given: torch.optim.Optimizer, *_: Any) -> None:
        if gate.stepping or any(given is ours for ours in holder.optimizers):
            return
        ours = {id(parameter) for parameter in holder.parameters()}
        if any(id(parameter) in ours for group in given.param_groups for parameter in group["params"]):
            raise checks.not_registered(type(given).__name__)
        if gate.inside and met.setdefault(given, gate.passes) != gate.passes:
            raise checks.stranger(type(given).__name__)

    register_optimizer_step_pre_hook(look)


def helpers(optimizers: list[torch.optim.Optimizer], gate: Gate) -> list[Stateful]:
    """Schedulers of these optimizers, and scalers, in the order in which they were made; put behind the gate."""
    if not _made:
        return []
    ours = {id(given) for given in optimizers}
    found = [
        helper
        for helper in _made
        if not isinstance(helper, LRScheduler) or id(getattr(helper, "optimizer", None)) in ours
    ]
    found.sort(key=lambda helper: _made[helper])
    for helper in found:
        if not hasattr(type(helper), "_stretto_gate"):
            _close(helper, gate)
    return found


def count() -> int:
    """Schedulers and scalers that there are, of any job."""
    return len(_made)


def scales(helpers: list[Stateful]) -> bool:
    """Whether a scaler looks after steps that have no finite gradient."""
    return any(isinstance(helper, torch.amp.GradScaler) and helper.is_enabled() for helper in helpers)


def forget_scaling(helper: Any) -> None:
    """Let a scaler begin the batch anew: it remembers which optimizers it has unscaled."""
    if isinstance(helper, torch.amp.GradScaler) and helper.is_enabled():
        helper._per_optimizer_states.clear()


def _close(helper: Any, gate: Gate) -> None:
    """Give the object a class of its own whose methods ask the gate: its state stays free of ours."""
    base = type(helper)
    names = ("step",) if isinstance(helper, LRScheduler) else ("step", "update", "unscale_")

    def gated(name: str) -> Callable[..., Any]:
        method = getattr(base, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, LRScheduler):
                gate.asked |= gate.last
                gate.asked_here |= name == "step"
                gate.wanted()
            return method(self, *args, **kwargs) if gate.steps_now else None

        call.__name__ = name
        return call

    helper.__class__ = type(base.__name__, (base,), {"_stretto_gate": gate, **{name: gated(name) for name in names}})


def _note(cls: type) -> None:
    """Have every object of the class noted when it is made."""
    init = cls.__init__  # type: ignore[misc]

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self not in _made:
            _made[self] = next(_numbers)

    cls.__init__ = noting  # type: ignore[misc]


_numbers = itertools.count()
for _kind in (LRScheduler, ReduceLROnPlateau, SequentialLR, ChainedScheduler, torch.amp.GradScaler):
    _note(_kind)
