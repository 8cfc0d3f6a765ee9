"""Does a worker that came later compute what the others do? What a script keeps to itself does not travel with the
state: a counter that anneals a loss, a second model that was never registered, a random generator of its own. Replicas
stay alike all the same, and the training is another one than without the growth.

So newcomers do their first step with the state whole on the samples of the member that they had it from, counting for
nothing; the gradients that both find are compared before newcomers get samples of their own. A difference ends the job.

Not where the others would have to take more samples than before (somebody leaves at the same moment), where samples of
several workers meet in the body (sums and gathers, SyncBatchNorm), where it depends on what is each worker's own
(statistics of BatchNorm in evaluation, spectral norms, `local=` parts), in loops without a dataset, whose data is the
script's own (an environment that plays on), nor in bitwise mode.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stretto.torch.groups import Group
from stretto.torch.net import OWN
from stretto.torch.packing import pack, unpack

_PARAMETERS, _VALUES, _ALL_VALUES = 4096, 512, 1 << 16
"""Of so many parameters at most so many values each are looked at, and about so many of all."""
_OF_ALL = 1e-2
"""A parameter's gradient may be off by rounding of at least this part of the norm of all gradients."""
_EXACT = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_ROUNDINGS = 10.0
_LOOSE = 2e-2
"""By norm: for shorter types, for GPUs, which may add up in any order, and between kinds of hardware."""


class Different(NamedTuple):
    """A newcomer, by rank, whose gradients are others than those of the member with the same samples."""

    newcomer: int
    other: int
    by: float
    """Of their norm."""


class Proof:
    """Of one member, in one step: from the beginning of the body on it listens, until `end`; `compare` after that."""

    def __init__(self, models: Iterable[nn.Module], parameters: Sequence[Tensor]) -> None:
        """Nothing is looked at where neither is given."""
        trained = [one for one in parameters if one.requires_grad and one.numel()]
        # Those at the end are the heads of models.
        self._looked_at = trained[:: max(1, -(-len(trained) // _PARAMETERS))] + trained[-1:]
        self._values = max(16, min(_VALUES, _ALL_VALUES // max(1, len(self._looked_at))))
        self._found: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.valid = True
        """Whether the body depends on nothing but these samples and what is alike on all workers."""
        for place, parameter in enumerate(self._looked_at):
            self._hooks.append(parameter.register_hook(self._hook(place)))  # type: ignore[no-untyped-call]
        own = [module for model in models for module in model.modules() if isinstance(module, OWN)]
        if own and _compiles():
            # What was compiled calls no hooks that came later.
            self.valid = False
        for module in own:
            self._hooks.append(module.register_forward_pre_hook(self._runs))

    def _runs(self, module: nn.Module, _: Any) -> None:
        if not (module.training and isinstance(module, _NormBase)):
            self.valid = False

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, place: int) -> Any:
        def look(gradient: Tensor) -> None:
            if gradient.layout != torch.strided:
                return
            flat = gradient.detach().reshape(-1)
            # From everywhere, and all of them together.
            some = torch.cat([flat[:: max(1, flat.numel() // self._values)][: self._values], flat.sum().reshape(1)])
            some = some.to("cpu", torch.complex128, copy=True)
            before = self._found.get(place)
            self._found[place] = some if before is None else before + some

        return look

    def compare(self, group: Group, sources: Mapping[int, int], kind: str) -> Different | None:
        """Called by all members; `sources` says by rank of whom each newcomer had the samples. Raises `GroupBroken`."""
        told = b""
        if group.rank in sources or group.rank in sources.values():
            within = max((self._within(one) for one in self._looked_at), default=0.0)
            values = [[place, self._found[place]] for place in sorted(self._found)]
            told = pack([json.dumps([kind, within, self.valid]), values])
        everybody = group.all_gather_bytes(told)
        for rank, other in sources.items():
            found, reference = _Told.read(everybody[rank]), _Told.read(everybody[other])
            if not (found.valid and reference.valid):
                continue
            by = _apart(reference.values, found.values)
            allowed = max(found.within, reference.within) if found.kind == reference.kind else _LOOSE
            # Numbers that are none say nothing: a scaler leaves such steps out.
            if by > allowed and _largest([*found.values.values(), *reference.values.values()]) > self._rounding():
                return Different(rank, other, by)
        return None

    def _rounding(self) -> float:
        """What of a gradient may be nothing but rounding, where a training has come to its end."""
        with torch.no_grad():
            each = [torch.finfo(one.dtype).eps * float(one.abs().max()) for one in self._looked_at if one.numel()]
        return _ROUNDINGS * max(each, default=0.0)

    def _within(self, parameter: Tensor) -> float:
        return _LOOSE if parameter.is_cuda else _EXACT.get(parameter.dtype, _LOOSE)


def _compiles() -> bool:
    """Whether anything in this process was compiled by torch.compile."""
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    return bool(getattr(dynamo, "FRAME_COUNTER", 0))


class _Told(NamedTuple):
    kind: str
    within: float
    valid: bool
    values: dict[int, Tensor]

    @classmethod
    def read(cls, given: bytes) -> _Told:
        head, values = unpack(given)
        kind, within, valid = json.loads(head)
        return cls(kind, within, valid, dict(values))


def _largest(values: Iterable[Tensor]) -> float:
    return max((float(value.abs().max()) for value in values if value.numel()), default=0.0)


def _apart(one: dict[int, Tensor], other: dict[int, Tensor]) -> float:
    """By norm, of the parameter where it is most: small ones would not be seen in the sum of all. What only one of them
    has a gradient for counts as zero in the other."""
    norms, differences = [], []
    for place in one.keys() | other.keys():
        a, b = one.get(place), other.get(place)
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None
        assert b is not None
        norms.append(max(float(torch.linalg.vector_norm(a)), float(torch.linalg.vector_norm(b))))
        differences.append(float(torch.linalg.vector_norm(a - b)))
    least = _OF_ALL * math.hypot(*norms)
    return max((much / max(norm, least) for much, norm in zip(differences, norms, strict=True) if much), default=0.0)
