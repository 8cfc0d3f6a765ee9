"""Back to the start of a batch that must be done again.

Before its step is applied a body changes little: buffers, schedulers, the scaler, extra state, options of optimizers,
which parameters are trained. These are noted at every batch's start; so are gradients where the script adds to those of
the batch before. Random generators are set before every pass (`chance`). Parameters and what optimizers keep change in
`step` only, which does nothing when the gradient did not arrive. There are two exceptions, for which the whole state is
copied: bodies with several steps, of one optimizer or of several, of which the first may be done when the gradient for
the second does not arrive; and scripts that change parameters by hand before their step. The first batch shows whether
a script does that, every later one is watched. What a script changes after `step` (a target that follows, an average)
it also changes when that did nothing: so parameters are copied in the moment in which a gradient is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from stretto.errors import StrettoError
from stretto.torch.state import Holder, foreign, gradient_of, put_gradients
from stretto.torch.transfer import marks

Buffers = dict[str, torch.Tensor | None]
"""Of one module."""


class CannotRepeat(StrettoError):
    """The batch cannot be done again."""

    code = "cannot-repeat"


class Habits:
    """What is known of a script; newcomers are told by those who have seen it."""

    def __init__(self) -> None:
        self.late = Late()
        self.by_hand: bool | None = None
        """Whether it changes parameters outside of `step`; None before its first batch."""
        self.carries: bool | None = None
        """Whether it adds gradients to those of a batch that was applied; None before anybody could tell."""
        self.goes_on: bool | None = None
        """Whether anything follows a step in its body that may fail; None before its first batch."""


class Late:
    """Does a body exchange anything after its step? Then a loss may ask for the step back. What it does under
    `every(n)` it does in those steps only; before the first such step nobody can know."""

    def __init__(self) -> None:
        self.happened = False
        """In the batch under way."""
        self._known: dict[int, bool | None] = {1: None}

    def told(self) -> list[tuple[int, bool]]:
        """What is known, for those who have seen less."""
        return [(every, known) for every, known in self._known.items() if known is not None]

    def hear(self, told: Iterable[tuple[int, bool]]) -> None:
        """What others know."""
        for every, known in told:
            self._known[every] = bool(self._known.get(every)) or known

    def asks(self, every: int) -> None:
        self._known.setdefault(every, None)

    def possible(self, step: int) -> bool:
        """In the step that makes so many."""
        return any(self._known[every] is not False for every in self._due(step))

    def learn(self, step: int) -> None:
        """That step is over."""
        due = self._due(step)
        if self.happened:
            self._known[max(due)] = True
        else:
            self._known.update({every: False for every in due if self._known[every] is None})
        self.happened = False

    def _due(self, step: int) -> list[int]:
        return [every for every in self._known if step % every == 0]


class Undo:
    """One batch after the other: `begin`, `before_step` and `look` as it goes, `take_back` if it failed."""

    def __init__(self, holder: Holder, habits: Habits) -> None:
        self.holder, self.habits = holder, habits
        self.late = habits.late
        self._whole: tuple[str, list[torch.Tensor]] | None = None
        self._noted: _Noted | None = None
        self._parameters: list[torch.nn.Parameter] = []
        self._tables: list[Buffers] = []
        self._room: list[torch.Tensor] = []
        self._versions = 0
        self._marks: Any = None
        self._looked = True
        self._changed = False
        self._stepped = False
        self._held: list[torch.Tensor] | None = None

    def enter(self) -> None:
        """A loop begins: what the models are made of is looked up once for all its batches."""
        self._parameters = self.holder.parameters()
        self._tables = [module._buffers for model in self.holder.models for module in model.modules()]

    def begin(self, cursor: tuple[int, ...], *, alone: bool) -> None:
        """A batch begins. Alone nothing can fail: then the script is watched only until it is known."""
        self._whole = self._noted = self._marks = self._held = None
        self._changed = self._stepped = False
        self._looked = alone and self.habits.by_hand is not None
        if self._looked:
            return
        self._versions = self.writes()
        if self.habits.by_hand is None:
            self._marks = marks(self._parameters)
        if alone:
            return
        self._noted = _Noted(self.holder, self._tables, self._room, self._parameters)
        if self.habits.by_hand is not False:
            self._copy(cursor)

    def before_step(self, cursor: tuple[int, ...]) -> None:
        """An optimizer is about to step."""
        self.look()
        if self._noted is not None and not self._stepped and self._may_fail_later(cursor):
            self._copy(cursor)
        self._stepped = True

    def _may_fail_later(self, cursor: tuple[int, ...]) -> bool:
        """Whether something may follow this step in the body that does not succeed."""
        several = len(self.holder.optimizers) > 1 or self.habits.goes_on is not False
        return several or self.late.possible(cursor[2] + 1)

    def hold(self) -> None:
        """The gradient is lost: whatever the body still does to parameters will be put back."""
        if self._noted is None or self._whole is not None:
            return
        self.look()
        if not self._changed and not self._stepped:
            self._held = [_apart(parameter) for parameter in self._parameters]

    def look(self) -> None:
        """Before the first step of the batch, or at its end: has the script changed parameters by itself?"""
        if self._looked:
            return
        self._looked = True
        self._changed = self._versions != self.writes()
        if self._marks is not None:
            self._changed |= self._marks != marks(self._parameters)
        self.habits.by_hand = bool(self.habits.by_hand) or self._changed

    def take_back(self, *, keep_new: bool = False) -> None:
        """Everything as it was when the batch began; `keep_new`: but for buffers that were not there."""
        assert self._noted is not None
        self.look()
        if self._whole is not None:
            self.holder.put(*self._whole)
        elif self._changed:
            raise CannotRepeat(
                "a worker was lost in a batch in which the script changed its parameters by hand, for the first time",
                hint="change them after step(), or in every batch from the first on",
            )
        elif self._stepped:
            raise CannotRepeat(
                "a worker was lost in a batch in which a backward pass followed a step(), or an exchange did, for the "
                "first time",
                hint="do so in every batch from the first on, or under job.every(n); or do it before step()",
            )
        elif self._held is not None:
            with torch.no_grad():
                for parameter, before in zip(self._parameters, self._held, strict=True):
                    parameter.copy_(before)
        self._noted.put_back(keep_new=keep_new)

    def _copy(self, cursor: tuple[int, ...]) -> None:
        if self._whole is None:
            skeleton, tensors = self.holder.take(cursor, replies=False)
            self._whole = skeleton, [tensor.clone() for tensor in tensors]

    def writes(self) -> int:
        """How often all parameters together were written to."""
        return sum([parameter._version for parameter in self._parameters])


class _Noted:
    """What the body of one batch may change before its step is applied, as it was at the batch's start."""

    def __init__(
        self,
        holder: Holder,
        tables: list[Buffers],
        room: list[torch.Tensor],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        """`room` is where buffers are copied to, kept from batch to batch."""
        self.holder, self.tables = holder, tables
        self.parameters, self.required = parameters, [given.requires_grad for given in parameters]
        self.gradients = [_own(gradient_of(given, carried=True)) for given in parameters] if holder.carries else None
        self.places = [(table, name) for table in tables if table for name, one in table.items() if one is not None]
        now = [buffer for table in tables if table for buffer in table.values() if buffer is not None]
        with torch.no_grad():
            if [_like(one) for one in room] != [_like(one) for one in now]:
                room[:] = [torch.empty_like(one) for one in now]
            if now:
                torch._foreach_copy_(room, now)
        self.buffers = room
        self.helpers = [_copied(helper.state_dict()) for helper in holder.helpers()]
        self.extras = {name: _copied(extra.state_dict()) for name, extra in holder.extras.items()}
        self.groups = [
            [{key: _own(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in holder.optimizers
        ]

    def put_back(self, *, keep_new: bool) -> None:
        """Everything as it was."""
        with torch.no_grad():
            for (table, name), before in zip(self.places, self.buffers, strict=True):
                now = table.get(name)
                if now is not None and _like(now) == _like(before):
                    now.copy_(before)
                else:
                    table[name] = before.clone()
        if not keep_new:
            self._forget_new()
        for helper, state in zip(self.holder.helpers(), self.helpers, strict=True):
            helper.load_state_dict(state)
        for name, extra in self.holder.extras.items():
            extra.load_state_dict(self.extras[name])
        for parameter, required in zip(self.parameters, self.required, strict=True):
            parameter.requires_grad_(required)
        for optimizer, groups in zip(self.holder.optimizers, self.groups, strict=True):
            for group in optimizer.param_groups[len(groups) :]:
                for parameter in group["params"]:
                    optimizer.state.pop(parameter, None)
            del optimizer.param_groups[len(groups) :]
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        # Gradients that the next batch does not add to are zeros, where there were any.
        left = [gradient_of(given, carried=False) for given in self.parameters]
        put_gradients(self.parameters, left if self.gradients is None else self.gradients)

    def _forget_new(self) -> None:
        """Buffers that have appeared since."""
        known = {(id(table), name) for table, name in self.places}
        for table in self.tables:
            for name, buffer in table.items():
                if buffer is not None and (id(table), name) not in known:
                    table[name] = None


def _like(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in main memory: a GPU may be full."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _own(value: Any) -> Any:
    """A learning rate may be a tensor, which schedulers write to."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    """The same value with containers, tensors and arrays of its own."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return kind(_copied(item) for item in value)
    raise foreign(value)
