"""Checkpoints of a job: taken at a boundary, written beside the training once the step is known to be committed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors.torch import load, save
from torch import Tensor

from stretto.runtime.checkpoint import AsyncSaver, StaleGeneration, Store
from stretto.torch.state import Holder

if TYPE_CHECKING:
    from stretto.torch.world import Cursor

EVERY_S = 60.0


class Checkpoints:
    """Of one worker; only the leader of a generation writes."""

    def __init__(self, folder: Path, holder: Holder, every_s: float = EVERY_S) -> None:
        self.folder, self.holder, self.every_s = folder, holder, every_s
        self._saver: AsyncSaver | None = None
        self._due_s = time.monotonic() + every_s
        self._taken: tuple[Cursor, int, str, list[Tensor]] | None = None

    def consider(self, cursor: Cursor, generation: int, *, leader: bool) -> None:
        """At a boundary: write what was taken at the last one, which is committed now; take another if it is time."""
        if not leader:
            self._taken = None
            return
        if self._taken is not None:
            taken, of, skeleton, tensors = self._taken
            self._taken = None
            if of == generation:
                self._write(taken, of, skeleton, tensors)
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self.every_s
            skeleton, tensors = self.holder.take(cursor)
            self._taken = cursor, generation, skeleton, [tensor.detach().cpu().clone() for tensor in tensors]

    def restore(self, generation: int) -> Cursor | None:
        """Load the newest checkpoint that is whole; from now on only this generation and later ones may write."""
        from stretto.torch.world import Cursor

        if not self.folder.is_dir():
            return None
        store = Store(self.folder)
        store.fence(generation)
        found = store.latest().checkpoint
        if found is None:
            return None
        skeleton, tensors = _unpack(found.read("state"), found.read("skeleton").decode())
        return Cursor(*self.holder.put(skeleton, tensors))

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()

    def _write(self, cursor: Cursor, generation: int, skeleton: str, tensors: list[Tensor]) -> None:
        if self._saver is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._saver = AsyncSaver(Store(self.folder))
        try:
            self._saver.save(
                cursor.applied,
                generation,
                {"state": lambda file: _pack(tensors, file), "skeleton": skeleton.encode()},
                {"loop": cursor.loop, "step": cursor.step},
            )
        except StaleGeneration:
            # Another generation writes now; this worker will hear of it.
            return


def write_file(path: Path, skeleton: str, tensors: list[Tensor]) -> None:
    """The whole state in one safetensors file, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    metadata = {"skeleton": skeleton}
    whole = {str(i): tensor.detach().cpu().contiguous().clone() for i, tensor in enumerate(tensors)}
    temporary.write_bytes(save(whole, metadata))
    temporary.replace(path)


def read_file(path: Path) -> tuple[str, list[Tensor]]:
    """What `write_file` wrote."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    skeleton = json.loads(data[8 : 8 + length])["__metadata__"]["skeleton"]
    return _unpack(data, skeleton)


def _pack(tensors: list[Tensor], file: BinaryIO) -> None:
    file.write(save({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}))


def _unpack(data: bytes, skeleton: str) -> tuple[str, list[Tensor]]:
    found: dict[str, torch.Tensor] = load(data)
    return skeleton, [found[str(i)] for i in range(len(found))]
