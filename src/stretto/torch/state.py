"""What all members of a job hold alike, and how it travels: models, optimizers, schedulers, scalers, extra state.

Which parameters require gradients and which groups an optimizer has belong to it, since scripts change both as they go;
so do gradients that the next batch adds to.

A state is taken apart into its tensors and a skeleton of plain values with numbered places for them; both go to a peer
or to a checkpoint, and are put together there. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from stretto.errors import StrettoError
from stretto.torch import epochs
from stretto.torch.frozen import Trained


class Stateful(Protocol):
    """Anything that a job can carry along."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class StateError(StrettoError):
    """A state that cannot travel, or does not fit where it arrived."""

    code = "state"


class Reply(NamedTuple):
    """What workers agreed on between loops: those who come later get it from here."""

    key: tuple[int, int, int]
    """Where in the script: loops begun, and the count of epochs and the epoch that it is in."""
    about: str
    result: Tensor
    """Packed."""


_STATISTICS = (-2, -2)
"""Stands for the epoch of a reply: what norms have gathered, told at the end of a loop."""


class Holder:
    """The registered parts of a job, in the order of their registration."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.extras: dict[str, Stateful] = {}
        self.helpers: Callable[[], list[Stateful]] = list
        """Schedulers and scalers that belong to the optimizers, found when asked for."""
        self.loop = 0
        """The loop that the script is at."""
        self.epochs: list[epochs.Place] = []
        """Of the calls of `Job.epochs`."""
        self.unapplied = False
        """Whether nothing stepped in the last batch."""
        self.carries = False
        """Whether the gradients of the last batch may be added to by the next one."""
        self.trained = Trained()
        self.stopping = False
        """The script has asked to end the loop: all do at the next boundary at which they know of it."""
        self.replies: list[Reply] = []
        self._replies_ever = 0
        self._ahead: tuple[str, list[Tensor]] | None = None
        """A state of a later loop: what the script does until it is there must not count."""

    def arrive(self) -> None:
        """The script has come to the loop that the state is of."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._load(assemble(*ahead))

    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once, in a fixed order."""
        found: dict[int, nn.Parameter] = {}
        for model in self.models:
            for parameter in model.parameters():
                found.setdefault(id(parameter), parameter)
        return list(found.values())

    def fingerprint(self) -> str:
        """Names, shapes and types of everything in the models: equal on all members, or they train different things."""
        parts = [
            f"{name} {tuple(tensor.shape)} {tensor.dtype}"
            for model in self.models
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, Tensor)
        ]
        return f"{len(parts)} tensors, {sum(p.numel() for p in self.parameters()):,} parameters: " + "; ".join(parts)

    def take(self, cursor: Sequence[int], *, replies: bool = True) -> tuple[str, list[Tensor]]:
        """The whole state as it is: a skeleton, and the tensors themselves (not copies); without `replies` but for what
        is agreed on between loops."""
        if self._ahead is not None:
            return self._ahead
        ours = self.parameters()
        whole = {
            "cursor": list(cursor),
            "models": [_tensors(model) for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "helpers": [helper.state_dict() for helper in self.helpers()],
            "extras": {name: extra.state_dict() for name, extra in self.extras.items()},
            "requires": [parameter.requires_grad for parameter in ours],
            "groups": [grouping(optimizer, ours) for optimizer in self.optimizers],
            "epochs": [list(place) for place in self.epochs],
            **({"replies": [list(one) for one in self.replies], "told": self._replies_ever} if replies else {}),
            "stopping": self.stopping,
            "unapplied": self.unapplied,
            "trained": [place for place, given in enumerate(ours) if id(given) in self.trained.ids],
            "gradients": [gradient_of(parameter, carried=self.carries) for parameter in ours],
        }
        return dismantle(whole)

    def put(self, skeleton: str, tensors: list[Tensor], *, values_only: bool = False) -> list[int]:
        """Replace the whole state; the cursor that came with it. The tensors belong to this holder from now on. With
        `values_only` the script stays as it is in all else: what it trains, and where it is."""
        whole = assemble(skeleton, tensors)
        cursor: list[int] = whole["cursor"]
        if values_only:
            for name in ("requires", "groups", "gradients", "epochs", "unapplied", "trained", "stopping"):
                whole.pop(name, None)
            cursor[0] = self.loop
        elif "replies" in whole:
            self.put_replies(whole["replies"], whole.get("told", len(whole["replies"])))
        if cursor[0] <= self.loop:
            self._ahead = None
            self._load(whole)
            return cursor
        self._ahead = skeleton, [tensor.clone() for tensor in tensors]
        # Evaluation before that loop is to see trained weights; but parts may be made only on the way there.
        with contextlib.suppress(StateError, ValueError):
            self._load(whole)
        return cursor

    def put_replies(self, told: list[list[Any]], ever: int) -> None:
        self.replies = [Reply(tuple(key), about, result.cpu()) for key, about, result in told]
        self._replies_ever = ever

    def add_reply(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._replies_ever += 1

    @property
    def replies_ever(self) -> int:
        """How many there were so far, forgotten ones too: whoever has more is further in the script."""
        return self._replies_ever

    def statistics_after(self, loop: int) -> bytes | None:
        """What the leader's norms had gathered when this loop was over, if all were told; packed."""
        key = (loop, *_STATISTICS)
        return next((one.result.numpy().tobytes() for one in self.replies if one.key == key), None)

    def keep_statistics(self, loop: int, told: bytes) -> None:
        self.forget_statistics(loop)
        key = (loop, *_STATISTICS)
        self.add_reply(Reply(key, "the statistics of norms", torch.frombuffer(bytearray(told), dtype=torch.uint8)))

    def forget_statistics(self, loop: int) -> None:
        """Of earlier loops: all are in this one."""
        self.replies = [one for one in self.replies if one.key[1:] != _STATISTICS or one.key[0] >= loop]

    def forget_replies(self, call: int, loop: int) -> None:
        """A call of `Job.epochs` comes to its next epoch, with which whoever comes later begins. Of the one before,
        which began with this loop, somebody may still need the last."""
        self.replies = [
            one for one in self.replies if one.key[1:] == _STATISTICS or one.key[1] < call or one.key[0] >= loop
        ]

    def _load(self, whole: dict[str, Any]) -> None:
        helpers = self.helpers()
        for kind, here in (("models", self.models), ("optimizers", self.optimizers), ("helpers", helpers)):
            if len(whole[kind]) != len(here):
                raise StateError(
                    f"the state has {len(whole[kind])} {kind}, this worker {len(here)}: "
                    "every worker must make the same models, optimizers and schedulers before its first batch; one "
                    "that comes later begins with the epoch that the job is in, so what a script makes "
                    "`if epoch == n` it does not have: make it before the loop over epochs"
                )
        with torch.no_grad():
            for model, state in zip(self.models, whole["models"], strict=True):
                _load_model(model, state)
        ours = self.parameters()
        # What an older checkpoint does not say is as the script has it.
        for parameter, required in zip(ours, whole.get("requires", ()), strict=False):
            parameter.requires_grad_(required)
        for optimizer, groups in zip(self.optimizers, whole.get("groups", ()), strict=False):
            regroup(optimizer, groups, ours)
        for part, state in zip(self.optimizers, whole["optimizers"], strict=True):
            part.load_state_dict(state)
            _keep_types(part, state)
        self.epochs, self.unapplied = epochs.read(whole.get("epochs", [])), whole.get("unapplied", False)
        self.stopping = whole.get("stopping", False)
        if "trained" in whole:
            self.trained.put({id(ours[place]) for place in whole["trained"] if place < len(ours)})
        left = whole.get("gradients", ())
        put_gradients(ours, left)
        # Before its first batch here is over nobody else can tell.
        self.carries = any(isinstance(one, Tensor) for one in left)
        for helper, state in zip(helpers, whole["helpers"], strict=True):
            helper.load_state_dict(state)
        for name, extra in self.extras.items():
            if name not in whole["extras"]:
                raise StateError(f"the state has no extra part {name!r}; it has {', '.join(whole['extras']) or 'none'}")
            extra.load_state_dict(whole["extras"][name])


def _keep_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Torch loads what an optimizer keeps in the type of its parameter: a product in float32 (NAdam's), or moments that
    are longer than the parameter, would not be what they were on the worker that sent them."""
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parts in state.get("state", {}).items():
        if not isinstance(parts, dict) or not isinstance(place, int) or place >= len(ours):
            continue
        here = optimizer.state.get(ours[place], {})
        for key, value in parts.items():
            found = here.get(key)
            if isinstance(value, Tensor) and isinstance(found, Tensor) and found.dtype != value.dtype:
                here[key] = value.to(found.device)


def grouping(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[list[int]]:
    """Its groups, as positions among the parameters of the job."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    return [[places.get(id(parameter), -1) for parameter in group["params"]] for group in optimizer.param_groups]


def regroup(optimizer: torch.optim.Optimizer, groups: list[list[int]], parameters: Sequence[Tensor]) -> None:
    """Give it these groups if it has others: a script may add some as it goes."""
    if grouping(optimizer, parameters) == groups or any(place < 0 for group in groups for place in group):
        return
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group({"params": [parameters[place] for place in group]})


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(given.grad is not None for group in optimizer.param_groups for given in group["params"])


def gradient_of(parameter: Tensor, *, carried: bool) -> Tensor | int | None:
    """What the next batch finds: a gradient that it may add to, or else whether there is any (0). One that is zero and
    none are different: optimizers pass over a parameter without one."""
    gradient = parameter.grad
    if gradient is None or not carried:
        return None if gradient is None else 0
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def put_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | int | None]) -> None:
    """What `gradient_of` took; none where nothing is said."""
    for place, parameter in enumerate(parameters):
        found = gradients[place] if place < len(gradients) else None
        if isinstance(found, int):
            found = _zeros_like(parameter)
        parameter.grad = None if found is None else found.to(parameter.device)


def _zeros_like(given: Tensor) -> Tensor:
    """Most scripts throw it away at once: so it costs nothing before anybody reads it."""
    if given.device.type != "cpu" or not given.is_contiguous() or not given.numel():
        return torch.zeros_like(given)
    memory = torch.from_numpy(np.zeros(given.nbytes, np.uint8))
    return memory.view(given.dtype).view(given.shape)


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Its state, and the buffers that it does not save."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def _load_model(model: nn.Module, state: dict[str, Any]) -> None:
    there = _tensors(model)
    buffers = {
        f"{path}.{name}" if path else name: module._buffers
        for path, module in model.named_modules()
        for name in module._buffers
    }
    different = sorted(name for name in there.keys() ^ state.keys() if name not in buffers)
    if different:
        raise StateError(f"the model of this worker differs from that of the job in {', '.join(different[:5])}")
    for name, table in buffers.items():
        # Some appear, or grow, as the model is used.
        found, told = table[name.rpartition(".")[2]], state.get(name)
        if isinstance(told, Tensor) and (found is None or found.shape != told.shape):
            there[name] = table[name.rpartition(".")[2]] = torch.empty_like(told, device=_device_of(model, told))
    for name, tensor in there.items():
        if not isinstance(tensor, Tensor) or name not in state:
            continue
        if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
            raise StateError(f"{name} is {tuple(tensor.shape)} here and {tuple(state[name].shape)} in the job's state")
        tensor.copy_(state[name])


def _device_of(model: nn.Module, otherwise: Tensor) -> torch.device:
    return next(model.parameters(), otherwise).device


def dismantle(value: Any, *, sort: bool = False) -> tuple[str, list[Tensor]]:
    """Plain values as JSON, tensors apart; one that appears several times travels once. With `sort` dicts are in the
    order of their keys, to be compared."""
    tensors: list[Tensor] = []
    seen: dict[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype], int] = {}

    def plain(part: Any) -> Any:
        if part is None or isinstance(part, (bool, str)):
            return part
        if isinstance(part, (int, float)) and type(part) in (int, float):
            return part if part == part and abs(part) != float("inf") else {"float": repr(part)}
        if isinstance(part, np.generic):
            return plain(part.item())
        if isinstance(part, np.ndarray):
            return {"array": plain(torch.from_numpy(part.copy()))}
        if isinstance(part, Tensor):
            part = part.resolve_conj().resolve_neg()
            key = (part.data_ptr(), tuple(part.shape), tuple(part.stride()), part.dtype)
            if part.numel() == 0 or key not in seen:
                seen[key] = len(tensors)
                tensors.append(part.detach())
            return {"tensor": seen[key]}
        if isinstance(part, bytes):
            return {"bytes": base64.b64encode(part).decode()}
        if isinstance(part, tuple):
            return {"tuple": [plain(item) for item in part]}
        if isinstance(part, (set, frozenset)):
            return {"set": [plain(item) for item in sorted(part, key=repr)]}
        if isinstance(part, list):
            return [plain(item) for item in part]
        if isinstance(part, Mapping):
            items = sorted(part.items(), key=lambda item: repr(item[0])) if sort else part.items()
            return {"dict": [[plain(key), plain(item)] for key, item in items]}
        raise foreign(part)

    return json.dumps(plain(value), separators=(",", ":")), tensors


def foreign(part: Any) -> StateError:
    """What is wrong with a value that cannot travel."""
    return StateError(
        f"a {type(part).__name__} cannot be part of the state of a job: use plain values, tensors and arrays"
    )


def assemble(skeleton: str, tensors: list[Tensor]) -> Any:
    """What was dismantled."""

    def whole(part: Any) -> Any:
        if isinstance(part, list):
            return [whole(item) for item in part]
        if not isinstance(part, dict):
            return part
        ((kind, inner),) = part.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "dict":
            return {whole(key): whole(item) for key, item in inner}
        if kind == "tuple":
            return tuple(whole(item) for item in inner)
        if kind == "set":
            return {whole(item) for item in inner}
        if kind == "array":
            return whole(inner).cpu().numpy()
        if kind == "bytes":
            return base64.b64decode(inner)
        return float(inner)

    return whole(json.loads(skeleton))
