"""The gradients of what scripts exchange.

The loss of the global batch is the mean of the workers' losses, each by the share of its samples. What a worker's own
numbers do to all of them is the sum of these shares of everybody's gradients; divided by its own share, since the sum
of gradients over the workers multiplies by that again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stretto.torch.checks import TrainingError

if TYPE_CHECKING:
    from stretto.torch.collectives import Collectives


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, operation: str, kinds: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.collectives, ctx.operation = collectives, operation
        ctx.share, ctx.counts = collectives.share(), collectives.counts()
        return tuple(one.clone() for one in collectives.summed([one.detach() for one in tensors], operation, kinds))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        totals = _over_all(ctx.collectives, f"the gradient of all_reduce(…, {ctx.operation!r})", ctx.share, gradients)
        factor = ctx.share if ctx.operation == "mean" else 1.0
        return None, None, None, *[_own(one, factor, ctx.share, counts=ctx.counts) for one in totals]


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, collectives: Collectives, rows: Tensor) -> Tensor:
        found, ctx.first, ctx.last = collectives.gathered(rows.detach())
        ctx.collectives, ctx.share, ctx.counts = collectives, collectives.share(), collectives.counts()
        ctx.shape = rows.shape
        return found.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (total,) = _over_all(ctx.collectives, "the gradient of all_gather(…)", ctx.share, gradients)
        own = total[ctx.first : ctx.last]
        if own.shape != ctx.shape:
            # It was lost on the way, or its rows do not count.
            own = total.new_zeros(ctx.shape)
        return None, _own(own, 1.0, ctx.share, counts=ctx.counts)


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, *_: Tensor) -> Tensor:
        return found.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise TrainingError(
            "there is no gradient through this job.all_reduce()",
            hint="sums and means have one, in a body that takes one pass for a step (without per_worker, accumulate "
            "and bitwise mode)",
        )


def _over_all(collectives: Collectives, about: str, share: float, gradients: Iterable[Tensor]) -> list[Tensor]:
    weighed = [one * share if share else torch.zeros_like(one) for one in gradients]
    with torch.no_grad():
        collectives.add_up(about, weighed)
    return weighed


def _own(total: Tensor, factor: float, share: float, *, counts: bool) -> Tensor:
    if share:
        return total * (factor / share)
    if counts and factor and bool(total.any()):
        raise TrainingError(
            "a gradient comes back to samples that weigh nothing",
            hint="let weight= be above zero for every slice, or leave it out with a loss over the global batch",
        )
    return torch.zeros_like(total)
