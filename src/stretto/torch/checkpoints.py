"""Checkpoints of a job: taken at a boundary, written beside the training once the step is known to be committed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from stretto.errors import UsageError
from stretto.runtime.checkpoint import AsyncSaver, CheckpointError, StaleGeneration, Store
from stretto.runtime.saying import say
from stretto.torch.state import Holder

if TYPE_CHECKING:
    from stretto.torch.world import Cursor

EVERY_S = 60.0
KEEP = 3
_SKELETON = "skeleton"
_HINT = "give a file that job.save() wrote"


class Checkpoints:
    """Of one worker; only the leader of a generation writes."""

    def __init__(self, folder: Path, holder: Holder, every_s: float = EVERY_S, keep: int = KEEP) -> None:
        self.folder, self.holder, self.every_s, self.keep = folder, holder, every_s, keep
        self._saver: AsyncSaver | None = None
        self._due_s = time.monotonic() + every_s
        self._taken: tuple[Cursor, int, str, list[Tensor]] | None = None
        self.saved: Callable[[int], None] = lambda step: None
        """Told the applied steps of every checkpoint that is whole on disk."""

    def consider(self, cursor: Cursor, generation: int, *, leader: bool) -> bool:
        """At a boundary: write what was taken at the last one, which is committed now; take another if it is time.
        Whether there was anything to do."""
        if not leader:
            self._taken = None
            return False
        busy = self._taken is not None
        if self._taken is not None:
            taken, of, skeleton, tensors = self._taken
            self._taken = None
            if of == generation:
                self._write(taken, of, skeleton, tensors)
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self.every_s
            skeleton, tensors = self.holder.take(cursor)
            self._taken = cursor, generation, skeleton, [tensor.detach().cpu().clone() for tensor in tensors]
            return True
        return busy

    def write_now(self, cursor: Cursor, generation: int) -> None:
        """What is there at this boundary, alone; returns when it is on disk."""
        self._write(cursor, generation, *self.holder.take(cursor))
        self.close()
        self._saver = None

    def restore(self, generation: int) -> Cursor | None:
        """Load the newest checkpoint that is whole; from now on only this generation and later ones may write."""
        from stretto.torch.world import Cursor

        if not self.folder.is_dir():
            return None
        store = Store(self.folder, self.keep)
        store.fence(generation)
        latest = store.latest()
        for rejected in latest.rejected:
            say(f"the checkpoint {rejected.path} cannot be used: {rejected.reason}")
        found = latest.checkpoint
        if found is None:
            if latest.rejected:
                say("no checkpoint is left: the training begins again")
            return None
        skeleton, tensors = _unpack(found.read("state"), found.read("skeleton").decode())
        return Cursor(*self.holder.put(skeleton, tensors))

    def close(self) -> None:
        """Wait for what is being written."""
        if self._saver is not None:
            with _not_fatal():
                self._saver.close()

    def _write(self, cursor: Cursor, generation: int, skeleton: str, tensors: list[Tensor]) -> None:
        if self._saver is None:
            self._saver = AsyncSaver(Store(self.folder, self.keep), lambda step: self.saved(step))
        with _not_fatal():
            self._saver.save(
                cursor.applied,
                generation,
                {"state": lambda file: _pack(tensors, file), "skeleton": skeleton.encode()},
                {"loop": cursor.loop, "step": cursor.step},
            )


def write_file(path: Path, skeleton: str, tensors: list[Tensor]) -> None:
    """The whole state in one safetensors file: it is there whole, or what was there before is."""
    whole = {str(i): tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
    content = save(whole, {_SKELETON: skeleton})
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as temporary:
        try:
            os.fchmod(temporary.fileno(), 0o644)
            temporary.write(content)
            temporary.flush()
            os.fsync(temporary.fileno())
            os.replace(temporary.name, path)
        except BaseException:
            os.unlink(temporary.name)
            raise


def read_file(path: Path) -> tuple[str, list[Tensor]]:
    """What `write_file` wrote."""
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        return _unpack(data, json.loads(data[8 : 8 + length])["__metadata__"][_SKELETON])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from None
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UsageError(f"{path} is not the whole state of a job: {error}", hint=_HINT) from None


@contextlib.contextmanager
def _not_fatal() -> Iterator[None]:
    """Training goes on when a checkpoint cannot be written; the next one is tried."""
    try:
        yield
    except StaleGeneration:
        # Another generation writes now; this worker will hear of it.
        return
    except (CheckpointError, OSError, ValueError, RuntimeError, SafetensorError) as error:
        say(f"a checkpoint could not be written: {error}")


def _pack(tensors: list[Tensor], file: BinaryIO) -> None:
    file.write(save({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}))


def _unpack(data: bytes, skeleton: str) -> tuple[str, list[Tensor]]:
    found: dict[str, torch.Tensor] = load(data)
    return skeleton, [found[str(i)] for i in range(len(found))]
