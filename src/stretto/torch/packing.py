"""Values as bytes: what members send each other and keep. Plain values, tensors and arrays; nothing is unpickled."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch

from stretto.torch.state import assemble, dismantle

_LENGTH = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """Raises `StateError` if there is anything else in it."""
    skeleton, tensors = dismantle(value)
    here = [tensor.cpu().contiguous() for tensor in tensors]
    head = json.dumps([skeleton, [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in here]]).encode()
    parts = [one.reshape(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b"" for one in here]
    return b"".join([_LENGTH.pack(len(head)), head, *parts])


def unpack(given: bytes) -> Any:
    """What was packed, with tensors of its own on the CPU."""
    (length,) = _LENGTH.unpack_from(given)
    at = _LENGTH.size + length
    skeleton, shapes = json.loads(given[_LENGTH.size : at])
    tensors = []
    for name, shape in shapes:
        dtype = getattr(torch, name)
        end = at + math.prod(shape) * dtype.itemsize
        # A copy, aligned as the type wants it.
        raw = bytearray(given[at:end])
        tensors.append(torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype))
        at = end
    return assemble(skeleton, tensors)
