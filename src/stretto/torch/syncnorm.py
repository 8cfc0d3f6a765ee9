"""SyncBatchNorm over the members of the moment: statistics are those of the global batch, whoever has its samples.

The framework's own needs its own process groups, and refuses CPUs. What a model has of it is given this class when it
is registered; the modules stay the objects they were. Outside of a loop's body, and alone, it is BatchNorm.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from stretto.torch.checks import TrainingError
from stretto.torch.collectives import Collectives

_over: list[weakref.ref[Collectives]] = []
"""Of the job of this process: not an attribute of the modules, which scripts copy and save."""


def adopt(model: nn.Module, collectives: Collectives) -> None:
    """Let its SyncBatchNorm be ours."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm
            _over[:] = [weakref.ref(collectives)]


class SyncBatchNorm(nn.SyncBatchNorm):
    """Over all samples of the global batch that count."""

    def forward(self, input: Tensor) -> Tensor:
        collectives = _over[0]() if _over else None
        uses_batch = self.training or self.running_mean is None
        if collectives is None or not uses_batch or not collectives.meets("SyncBatchNorm"):
            return nn.functional.batch_norm(
                input,
                self.running_mean if not self.training or self.track_running_stats else None,
                self.running_var if not self.training or self.track_running_stats else None,
                self.weight,
                self.bias,
                uses_batch,
                self._factor() if self.training and self.track_running_stats else 0.0,
                self.eps,
            )
        self._check_input_dim(input)
        flat = input.transpose(0, 1).reshape(input.shape[1], -1)
        wide = torch.promote_types(flat.dtype, torch.float32)
        normal, count, mean, variance = _Normal.apply(flat.to(wide), collectives, self.eps)  # type: ignore[no-untyped-call]
        if self.training and self.track_running_stats:
            self._remember(int(count), mean, variance)
        found: Tensor = normal.reshape(input.transpose(0, 1).shape).transpose(0, 1)
        if self.weight is not None:
            shape = [1, -1, *[1] * (input.dim() - 2)]
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(input.dtype)

    def _factor(self) -> float:
        """How much of the running statistics this batch replaces."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return float(self.momentum or 0.0)

    @torch.no_grad()
    def _remember(self, count: int, mean: Tensor, variance: Tensor) -> None:
        factor = self._factor()
        assert self.running_mean is not None
        assert self.running_var is not None
        unbiased = variance * (count / max(1, count - 1))
        self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
        self.running_var.mul_(1 - factor).add_(unbiased.to(self.running_var.dtype), alpha=factor)


class _Normal(torch.autograd.Function):
    """Rows are channels. The way back is that of BatchNorm with every sample's gradient weighed by its worker's share;
    see `collectives`."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, collectives: Collectives, eps: float) -> tuple[Tensor, ...]:
        counts = collectives.counts()
        own = flat.shape[1] if counts else 0
        sums = [torch.tensor([float(own)], dtype=torch.float64), _sum(flat, own)]
        counted = collectives.add_up("SyncBatchNorm", sums)
        if counted and float(sums[0]) < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(flat.shape)}")
        # After a loss a worker without samples that count has nothing at all: any numbers will do.
        count = max(1.0, float(sums[0]))
        mean = (sums[1] / count).to(flat.dtype)
        squares = [_sum((flat - mean[:, None]).square(), own)]
        collectives.add_up("SyncBatchNorm", squares)
        variance = (squares[0] / count).to(flat.dtype)
        scale = torch.rsqrt(variance + eps)
        normal = (flat - mean[:, None]) * scale[:, None]
        ctx.save_for_backward(normal, scale)
        ctx.collectives, ctx.count, ctx.share, ctx.counts = collectives, count, collectives.share(), counts
        tally = torch.tensor(count)
        ctx.mark_non_differentiable(tally, mean, variance)
        return normal, tally, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        gradient, (normal, scale), share = gradients[0], ctx.saved_tensors, ctx.share
        weighed = gradient * share if share else torch.zeros_like(gradient)
        sums = [weighed.sum(1), (weighed * normal).sum(1)]
        with torch.no_grad():
            ctx.collectives.add_up("the gradient of SyncBatchNorm", sums)
        if not share:
            if ctx.counts and any(bool(one.any()) for one in sums):
                raise TrainingError(
                    "SyncBatchNorm has samples that weigh nothing", hint="let weight= be above zero for every slice"
                )
            return torch.zeros_like(gradient), None, None
        back = weighed - (sums[0][:, None] + normal * sums[1][:, None]) / ctx.count
        return back * (scale[:, None] / share), None, None


def _sum(values: Tensor, counted: int) -> Tensor:
    """Over the samples, in double precision where that is cheap to send."""
    return values.sum(1, dtype=torch.float64) if counted else values.new_zeros(values.shape[0], dtype=torch.float64)
