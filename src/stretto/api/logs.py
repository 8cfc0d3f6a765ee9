"""Log files, read safely: nothing but the logs of one job's workers, whatever a name or a link may say.

A log is bounded by giving up its beginning, which then is a hole; offsets stay what they were. Texts are cut between
characters only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stretto import jobfiles
from stretto.errors import NotFound, UsageError

_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MOST_NAMES = 100_000
_BLOCK = 2**16
_LONGEST_TAIL = 16 * 2**20
"""However long its lines are, a tail is no longer."""


class Text(NamedTuple):
    offset: int
    """Of its first byte."""
    text: str
    next: int
    """Where to go on."""


class LogFolder:
    """The logs of one job. `root` is trusted, what is below it is not: jobs can write there."""

    def __init__(self, root: Path, folder: Path, known: Callable[[str], bool] | None = None) -> None:
        """`known`: whether there was ever a worker of that name; jobs can make files of any."""
        self._root, self._folder, self._known = root, folder, known

    def workers(self) -> list[str]:
        """Those that have a log, in the order they came."""
        try:
            names = jobfiles.names(self._folder, _MOST_NAMES, root=self._root)
        except OSError:
            return []
        found = [name[:-4] for name in names if name.endswith(".log") and _WORKER.fullmatch(name[:-4])]
        found = [name for name in found if self._known is None or self._known(name)]
        return sorted(found, key=lambda name: [int(part) if part.isdigit() else part for part in _split(name)])

    def open(self, worker: str) -> int:
        """A descriptor for reading its log. Raises `NotFound`."""
        if not _WORKER.fullmatch(worker):
            raise UsageError(f"{worker!r} is not the name of a worker", hint="they are called w0, w1 and so on")
        try:
            return jobfiles.opened(self._folder / f"{worker}.log", root=self._root)
        except OSError:
            raise _no_log(worker) from None


def start(fd: int) -> int:
    """The first byte that is still there."""
    size = os.fstat(fd).st_size
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:
        return size


def read(fd: int, offset: int, limit: int, *, final: bool) -> Text:
    """At most so many bytes from there on. A character that is not complete yet is left for the next time, unless the
    log is `final`."""
    first = start(fd)
    offset = max(offset, first)
    # A job can make its log so long that what is asked for would reach beyond all numbers.
    data = os.pread(fd, max(0, min(limit, os.fstat(fd).st_size - offset)), offset)
    if offset == first and first:
        skipped = len(data) - len(data.lstrip(b"\0"))
        skipped += _inner_bytes(data[skipped:])
        data, offset = data[skipped:], offset + skipped
    at_end = len(data) < limit
    if not (final and at_end):
        data = data[: len(data) - _incomplete(data)] or (data if len(data) == limit else b"")
    return Text(offset, data.decode(errors="replace"), offset + len(data))


def tail_offset(fd: int, lines: int) -> int:
    """Where the last so many lines begin."""
    size, first = os.fstat(fd).st_size, start(fd)
    floor = max(first, size - _LONGEST_TAIL)
    position, found = size, 0
    if lines == 0:
        return size
    while position > floor:
        begin = max(floor, position - _BLOCK)
        block = os.pread(fd, position - begin, begin)
        end = len(block) - 1 if position == size and block.endswith(b"\n") else len(block)
        while (at := block.rfind(b"\n", 0, end)) >= 0:
            found += 1
            if found == lines:
                return begin + at + 1
            end = at
        position = begin
    return floor if floor == first else floor + _inner_bytes(os.pread(fd, 3, floor))


def end_offset(fd: int, most: int) -> int:
    """Where the last so many bytes begin, between two characters."""
    size, first = os.fstat(fd).st_size, start(fd)
    if size - first <= most:
        return first
    return size - most + _inner_bytes(os.pread(fd, 3, size - most))


def _inner_bytes(data: bytes) -> int:
    """How many bytes at the beginning belong to a character that began before."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count


def _incomplete(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back and byte < 0xF8 else 0
    return 0


def _split(name: str) -> list[str]:
    return [part for part in re.split(r"(\d+)", name) if part]


def _no_log(worker: str) -> NotFound:
    return NotFound(f"there is no log of a worker {worker!r}", hint="a worker has one as soon as it was started")
