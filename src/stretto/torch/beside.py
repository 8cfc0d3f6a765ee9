"""One exchange between all members of a group, over connections that gradients do not use.

Everybody sends what it is about and some bytes, and gets everybody's. Members that are about different things learn of
it, and so does one that waits for others which wait in a sum of gradients instead.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch

from stretto.torch.checks import TrainingError
from stretto.torch.groups import Group

FORMING_S = 30.0
_FRAME = 4096
"""Bytes that travel at once: enough for figures; more follow only where somebody has more."""
_HEAD = struct.Struct("<QH")
_MOST_WORDS = 512


class Told(NamedTuple):
    about: str
    given: bytes


def exchange(group: Group, about: str, given: bytes) -> list[Told]:
    """By rank. Raises `GroupBroken`, or `TrainingError` where members do different things."""
    if group.size == 1:
        return [Told(about, given)]
    _meet(group, about)
    words = about.encode()
    if len(words) > _MOST_WORDS:
        words = words[:_MOST_WORDS] + f"… ({zlib.crc32(words):08x})".encode()
    room = _FRAME - _HEAD.size - len(words)
    frame = _HEAD.pack(len(given), len(words)) + words + given[:room]
    found = [_read(row) for row in group.gather_beside(_bytes(frame, _FRAME), lambda: _look(group, about))]
    _check_alike([told.about for told, _ in found])
    rest = max(length - len(told.given) for told, length in found)
    if rest <= 0:
        return [told for told, _ in found]
    rows = group.gather_beside(_bytes(given[room:], rest), lambda: _look(group, about))
    return [
        Told(told.about, told.given + row[: length - len(told.given)].numpy().tobytes())
        for (told, length), row in zip(found, rows, strict=True)
    ]


def add_up(group: Group, about: str, tensors: list[torch.Tensor]) -> None:
    """Sums over the members, in place: for what is too large to be gathered. All have the same shapes."""
    for tensor in tensors:
        group.reduce_beside(tensor, lambda: _look(group, about))


def _meet(group: Group, about: str) -> None:
    _complain(group.open_beside(FORMING_S), about)


def _look(group: Group, about: str) -> None:
    _complain(group.elsewhere(), about)


def _complain(elsewhere: tuple[int, ...], about: str) -> None:
    if elsewhere:
        ranks = ", ".join(map(str, elsewhere))
        raise TrainingError(
            f"this worker is at job.{about}, and the workers of rank {ranks} go on without it",
            hint="let all workers call it, equally often and in the same order, whatever their samples are",
        )


def _check_alike(abouts: list[str]) -> None:
    present: dict[str, int] = {}
    for rank, about in enumerate(abouts):
        present.setdefault(about, rank)
    if len(present) > 1:
        each = "; ".join(f"rank {rank} is at job.{about}" for about, rank in present.items())
        raise TrainingError(
            f"the workers exchange different things: {each}",
            hint="let all workers call the same, equally often and in the same order",
        )


def _bytes(given: bytes, length: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(given.ljust(length, b"\0")), dtype=torch.uint8)


def _read(row: torch.Tensor) -> tuple[Told, int]:
    """What came with the first frame, and how long the whole is."""
    frame = row.numpy().tobytes()
    length, words = _HEAD.unpack_from(frame)
    at = _HEAD.size + words
    return Told(frame[_HEAD.size : at].decode(errors="replace"), frame[at : at + length]), length
