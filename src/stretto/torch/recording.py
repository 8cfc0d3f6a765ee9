"""What `stretto check` sees of a script: digests of all that a worker holds, step by step. Variables ask for it:

| variable | meaning |
|---|---|
| STRETTO_RECORD | the folder to write to; nothing happens without it |
| STRETTO_RECORD_STEPS | after so many steps the loop ends as by `job.stop()`, and the script at its next loop |
| STRETTO_RECORD_EVERY | every so many steps, besides the first ones and the last |
| STRETTO_RECORD_START | a file: the state to begin with; whoever finds none writes it |
| STRETTO_RECORD_NUDGE | 1: begin with every parameter changed by its last bit, to see how much rounding grows |
| STRETTO_RECORD_HOLD | steps after which to wait for a file `go-STEP` in the folder |

After a wait, a file `kill-WORKER` in the folder kills that worker in its next backward pass.

A digest is short, and yet says how far two tensors are apart: up to 256 values are kept as they are, of more of them
they are added up with fixed random signs into 256 sums, whose difference has the norm of the tensors' difference
(within some 10 %). It is linear: also updates can be compared, in size and direction.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import random
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from stretto.torch import variables
from stretto.torch.checkpoints import read_file, write_file
from stretto.torch.state import Holder

if TYPE_CHECKING:
    from stretto.torch.job import Job

SUMS = 256
_CHUNK = SUMS << 14
"""So many values are added up at a time."""
_FIRST = 20
"""Every one of the first steps is written, whatever the period."""
_HOLD_S = 120.0
"""Whoever was to let it go on is gone by then."""


def enter(job: Job) -> None:
    """A loop is about to begin."""
    if (recorder := _recorder()) is not None:
        recorder.enter(job)


def compares() -> bool:
    """Whether runs are compared afterwards: then replicas that part are let go on, and shown."""
    return _recorder() is not None


def settled(job: Job) -> bool:
    """A step was applied; whether the loop is to end."""
    return (recorder := _recorder()) is not None and recorder.settled(job)


class Recorder:
    """Of one worker."""

    def __init__(self, folder: Path, given: Mapping[str, str]) -> None:
        self.folder = folder
        self.worker = given.get("STRETTO_WORKER", "alone")
        self.steps = int(given.get("STRETTO_RECORD_STEPS", "50"))
        self.every = int(given.get("STRETTO_RECORD_EVERY", "1"))
        self.start = Path(given["STRETTO_RECORD_START"]) if "STRETTO_RECORD_START" in given else None
        self.nudge = given.get("STRETTO_RECORD_NUDGE") == "1"
        self.holds = {int(step) for step in given.get("STRETTO_RECORD_HOLD", "").split(",") if step}
        self.digest = Digest()
        self._begun = self._over = False
        self._own_start = False
        self._random: dict[str, bytes] = {}
        self._loop = -1
        folder.mkdir(parents=True, exist_ok=True)

    def enter(self, job: Job) -> None:
        """Before the first loop all runs are brought to the same start; after the last step the script has shown what
        it was to show."""
        if self._over:
            raise SystemExit(0)
        if self._begun:
            return
        self._begun = True
        with contextlib.suppress(ValueError, RuntimeError):  # Not the main thread: then a hang has no stacks.
            faulthandler.register(signal.SIGUSR1, all_threads=True)
        if self.start is not None:
            self._begin_alike(job, self.start)
        if self.nudge:
            _nudge(job.holder)
        self._write(job, drawn=[])

    def settled(self, job: Job) -> bool:
        applied, drawn = job.cursor.applied, self._drawn(job)
        plan = job._plan
        last = job.cursor.over or (plan is not None and job.cursor.step >= plan.loop.total_steps)
        if applied <= _FIRST or applied % self.every == 0 or applied >= self.steps or last or applied in self.holds:
            self._write(job, drawn, ends=bool(last) or applied >= self.steps)
        self._over |= applied >= self.steps
        if applied in self.holds:
            self._hold(applied)
            if (self.folder / f"kill-{self.worker}").exists():
                _die_in_backward(job.holder)
        # A stop takes effect one step later.
        return applied >= self.steps - 1

    def _begin_alike(self, job: Job, start: Path) -> None:
        """Scripts need not seed their weights: all runs begin with those of the first."""
        job.holder.helpers()
        if not start.exists():
            write_file(start, *job.holder.take(job.cursor))
            return
        before = [parameter.detach().clone() for parameter in job.holder.parameters()]
        job.holder.put(*read_file(start))
        after = job.holder.parameters()
        self._own_start = any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))

    def _write(self, job: Job, drawn: list[str], *, ends: bool = False) -> None:
        parts = list(_parts(job.holder))
        folded = [self.digest.of(tensor) for _, _, tensor in parts]
        meta = {
            "step": job.cursor.applied,
            "loop": job.cursor.loop,
            "worker": self.worker,
            "rank": job.rank,
            "size": job.size,
            "generation": job.generation,
            "own_start": self._own_start,
            "drawn": drawn,
            "traits": _traits(job.holder),
            "own": variables.own(job) if ends else {},
            "parts": [
                [name, kind, str(tensor.dtype).removeprefix("torch."), tensor.numel(), len(values)]
                for (name, kind, tensor), values in zip(parts, folded, strict=True)
            ],
        }
        whole = io.BytesIO()
        text = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8)
        np.savez(whole, meta=text, values=np.concatenate(folded) if folded else np.zeros(0))
        path = self.folder / f"{job.cursor.applied:08d}-{self.worker}.npz"
        # A worker may be killed while it writes.
        path.with_suffix(".part").write_bytes(whole.getvalue())
        path.with_suffix(".part").rename(path)

    def _drawn(self, job: Job) -> list[str]:
        """Whose random numbers the body took since the step before, if that was in the same loop."""
        now = _generators(job.device)
        before, self._random = self._random if self._loop == job.cursor.loop else {}, now
        self._loop = job.cursor.loop
        return sorted(name for name, state in now.items() if name in before and before[name] != state)

    def _hold(self, step: int) -> None:
        until_s = time.monotonic() + _HOLD_S
        while not (self.folder / f"go-{step}").exists() and time.monotonic() < until_s:
            time.sleep(0.005)


class Digest:
    """A tensor in a few numbers, linear and of the same norm."""

    def __init__(self) -> None:
        self._signs: dict[torch.device, Tensor] = {}

    def of(self, tensor: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
        flat = tensor.detach()
        flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
        if flat.numel() <= SUMS:
            return flat.to("cpu", torch.float64).numpy()
        sums = torch.zeros(SUMS, dtype=torch.float64)
        for start in range(0, flat.numel(), _CHUNK):
            piece = flat[start : start + _CHUNK]
            signed = piece.to(torch.float64) * self._prefix(start, piece)
            signed = nn.functional.pad(signed, (0, -len(signed) % SUMS))
            sums += signed.view(-1, SUMS).sum(0).cpu()
        return sums.numpy()

    def _prefix(self, start: int, piece: Tensor) -> Tensor:
        """The same signs for the same places, in every process."""
        known, needed = self._signs.get(piece.device), start + len(piece)
        if known is None or len(known) < needed:
            blocks = range(-(-needed // _CHUNK))
            made = [torch.randint(0, 2, (_CHUNK,), generator=torch.Generator().manual_seed(i)) for i in blocks]
            known = self._signs[piece.device] = (2 * torch.cat(made) - 1).to(piece.device, torch.int8)
        return known[start:needed]


def _parts(holder: Holder) -> Iterator[tuple[str, str, Tensor]]:
    """Name, kind and value of everything, in the order in which a reader would ask: the model first."""
    names: dict[int, str] = {}
    for i, model in enumerate(holder.models):
        prefix = f"model[{i}]." if len(holder.models) > 1 else ""
        for name, parameter in model.named_parameters():
            names[id(parameter)] = prefix + name
            yield prefix + name, "parameter", parameter
        for name, buffer in model.named_buffers():
            yield prefix + name, "buffer", buffer
    for i, optimizer in enumerate(holder.optimizers):
        prefix = f"optimizer[{i}]." if len(holder.optimizers) > 1 else ""
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield from _values(f"{prefix}{key} of group {number}", value)
            for place, parameter in enumerate(group["params"]):
                whose = names.get(id(parameter), f"parameter {place} of group {number}")
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        yield f"{prefix}{key} of {whose}", f"optimizer {key}", value
                    else:
                        yield from _values(f"{prefix}{key} of {whose}", value)
    for i, helper in enumerate(holder.helpers()):
        yield from _values(f"{type(helper).__name__}[{i}]", helper.state_dict())
    for name, extra in holder.extras.items():
        yield from _values(name, extra.state_dict())


def _values(name: str, value: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Numbers, wherever they are in a plain value."""
    if isinstance(value, (bool, int, float, np.generic)):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            yield name, "value", torch.tensor(float(value), dtype=torch.float64)
    elif isinstance(value, (Tensor, np.ndarray)):
        with contextlib.suppress(TypeError):
            yield name, "value", torch.as_tensor(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _values(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (bool, int, float)) for one in value):
            yield name, "value", torch.tensor([float(one) for one in value], dtype=torch.float64)
        else:
            for i, inner in enumerate(value):
                yield from _values(f"{name}[{i}]", inner)


def _traits(holder: Holder) -> dict[str, Any]:
    """What explains differences."""
    modules = [(name, module) for model in holder.models for name, module in model.named_modules()]
    batch_norm, dropout = nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd
    return {
        "batch_norm": [name for name, module in modules if isinstance(module, batch_norm) and module.training],
        "dropout": [n for n, module in modules if isinstance(module, dropout) and module.training and module.p > 0],
        "optimizers": len(holder.optimizers),
    }


def _nudge(holder: Holder) -> None:
    """By as much as rounding may do in one operation."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in holder.parameters():
            if parameter.is_floating_point():
                signs = 2 * torch.randint(0, 2, parameter.shape, generator=chance) - 1
                relative = torch.finfo(parameter.dtype).eps * signs.to(parameter.device, parameter.dtype)
                parameter.add_(parameter * relative)


def _die_in_backward(holder: Holder) -> None:
    """As the kernel would end it, while the others wait for its gradients."""
    for parameter in holder.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[no-untyped-call]


def _generators(device: torch.device) -> dict[str, bytes]:
    """The states of the random generators; of those that were seeded and not used since, nothing."""
    state = torch.get_rng_state().numpy().tobytes()
    left, following = struct.unpack_from("<i4xq", state, 8)
    python, array = random.getstate()[1], np.random.get_state(legacy=False)["state"]
    found = {
        "torch": b"" if (left, following) == (1, 0) else state,
        "random": b"" if python[-1] == len(python) - 1 else repr(python).encode(),
        "numpy.random": b""
        if array["pos"] == len(array["key"])
        else array["key"].tobytes() + bytes([array["pos"] % 256]),
    }
    if device.type == "cuda":
        seed_and_offset = torch.cuda.get_rng_state(device).numpy().tobytes()
        found["torch.cuda"] = seed_and_offset if any(seed_and_offset[8:]) else b""
    return found


def _recorder() -> Recorder | None:
    """Looked up when the first loop begins: workers may be forks of an interpreter that was imported long before."""
    global _made, _looked
    if not _looked:
        _looked = True
        folder = os.environ.get("STRETTO_RECORD")
        _made = Recorder(Path(folder), os.environ) if folder else None
    return _made


_made: Recorder | None = None
_looked = False
