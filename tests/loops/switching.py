"""Checks and mechanisms, and how each is switched off: to see that without it a result is wrong.

The variable WITHOUT names one for run.py; the product has no such switch.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.runtime.messages import Bye
from stretto.torch import chance, data, frozen, gate, state, undo
from stretto.torch import job as jobs
from stretto.torch.collectives import Collectives
from stretto.torch.departures import Departures


def comparing_replicas_alone() -> None:
    gate.refuse_strangers = lambda *_: None
    jobs.Job._check_gradients = lambda _: None  # type: ignore[method-assign]
    jobs.Job._check_unchanged = lambda *_: None  # type: ignore[method-assign]
    frozen.Frozen.watch = lambda *_: None  # type: ignore[method-assign]


def order_in_passes() -> None:
    """Nobody looks what comes before a backward pass."""
    jobs.Job._backward_begins = lambda _: None  # type: ignore[method-assign]


def buffers_in_passes() -> None:
    """Nobody looks what the model changes in each of them."""
    jobs.forward_sums = lambda *_: {}  # type: ignore[assignment]


def left_over_gradients() -> None:
    """They neither travel nor are rolled back."""

    def none(parameter: Tensor, *, carried: bool) -> int | None:
        return None if parameter.grad is None else 0

    state.gradient_of = none
    undo.gradient_of = none


def loops_of_epochs() -> None:
    """An epoch is taken for one loop."""

    def epochs(self: jobs.Job, count: int) -> Iterator[int]:
        epoch = 0
        while (epoch := max(epoch, self.cursor.loop)) < count:
            yield epoch
            epoch += 1

    jobs.Job.epochs = epochs  # type: ignore[method-assign]


def steps_outside() -> None:
    jobs.Job._flushes = lambda _: True  # type: ignore[method-assign]


def loops_of_others() -> None:
    """A script that ends does not say after how many loops."""
    jobs.Bye = lambda reason, loops=-1: Bye(reason=reason)  # type: ignore[assignment,misc]


def exits() -> None:
    Departures.by_exit = lambda _: False  # type: ignore[method-assign]
    Departures.ended_by_exit = lambda _: False  # type: ignore[method-assign]


def statistics_of_all() -> None:
    """SyncBatchNorm is BatchNorm."""
    Collectives.meets = lambda *_: False  # type: ignore[method-assign]


def rows_of_all() -> None:
    """Rows are not gathered."""
    Collectives.gathered = lambda _, rows: (rows, 0, len(rows))  # type: ignore[method-assign]


def numbers_by_sample() -> None:
    """Noise is drawn by the place in the slice."""
    right = chance.noise

    def by_place(seed: int, loop: int, step: int, indices: Sequence[int], *rest: Any) -> Tensor:
        return right(seed, loop, step, range(len(indices)), *rest)

    chance.noise = by_place


def numbers_by_slice() -> None:
    """Every slice draws the same."""
    right = chance.begin_pass

    def alike(seed: int, loop: int, step: int, first: int, device: torch.device, phase: int = 0) -> None:
        right(seed, loop, step, 0, device, phase)

    chance.begin_pass = alike


def readings() -> None:
    """No sample is read twice to see whether it is the same."""
    data.Samples._is_steady = lambda *_: True  # type: ignore[method-assign]


def loops_at_once() -> None:
    """Nobody looks whether another loop was begun meanwhile."""
    right = textwrap.dedent(inspect.getsource(jobs.Job._loop))
    looks_away = right.replace("if self._loops != number + 1:", "if False:")
    assert looks_away != right
    made = dict(vars(jobs))
    exec(looks_away, made)
    jobs.Job._loop = made["_loop"]  # type: ignore[method-assign]


def nothing() -> None:
    """There is no check: no worker can tell."""


OFF: dict[str, Callable[[], None]] = {
    switch.__name__: switch
    for switch in (
        comparing_replicas_alone,
        order_in_passes,
        buffers_in_passes,
        left_over_gradients,
        loops_of_epochs,
        steps_outside,
        loops_of_others,
        exits,
        statistics_of_all,
        rows_of_all,
        numbers_by_sample,
        numbers_by_slice,
        readings,
        loops_at_once,
        nothing,
    )
}
