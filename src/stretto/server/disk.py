"""Room on the disk: what each job takes of it, and whether enough is left for the server itself.

A job's folder, with its logs and checkpoints, has a bound (`resources.disk`). Who is over it is told once, and ended if
it still is a while later, or far over it at any time. What a folder holds is counted in a thread, a part of a second
for each job in turn: however much a job puts there, it delays only its own count.

The server keeps a reserve on the file system of its data directory, so that what has happened can be written down.
Where less than that is free nothing more is accepted, before the store itself has to refuse.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stretto import jobfiles
from stretto.jobs import events as e
from stretto.server.book import Active, Book
from stretto.tasks import aside

_log = logging.getLogger("stretto.server")

DEFAULT_MIB = 100 << 10
"""Of a job that says nothing."""
_FAR = 1.25
"""So many times its bound nobody is over for a moment only."""
_SLICE_S = 0.25
_LONGEST_S = 30.0
_DEEPEST = 200
_AT_ONCE = 500
_MOST_LINKED = 1_000_000
_MOST_RESERVE, _RESERVE_SHARE = 512 << 20, 0.05
_RESERVE_FILES, _FILES_SHARE = 1000, 0.02


@dataclass(frozen=True)
class Rules:
    every_s: float = 10.0
    """How often all jobs are looked at."""
    room_every_s: float = 1.0
    grace_s: float = 60.0
    """So long a job may be over its bound when it was told."""
    reserve_mib: int | None = None
    """What must be free for the server; None: 512 MiB, or 5 % of a smaller disk."""


class Room(NamedTuple):
    """On a file system."""

    free: int
    size: int
    files_free: int
    files: int
    """0: it does not count them."""


class Count:
    """What some folders hold, as far as it is counted. Links count nothing, files with several names once."""

    def __init__(self, folders: Sequence[Path], root: Path) -> None:
        """`root`: who can replace anything below it can do no more than spoil the count."""
        self.bytes = 0
        self.hidden = ""
        """What cannot be counted, if anything is there that cannot."""
        self.whole = False
        self._root = root
        self._linked: set[tuple[int, int]] = set()
        self._steps = self._walk(list(folders))

    def go_on(self, until_s: float) -> None:
        """In a thread, up to this moment of the kernel's monotonic time; or to the end."""
        for _ in self._steps:
            if time.monotonic() >= until_s:
                return
        self.whole = True

    def _walk(self, waiting: list[Path]) -> Iterator[None]:
        while waiting:
            folder = waiting.pop()
            if len(folder.parts) - len(self._root.parts) > _DEEPEST:
                self.hidden = self.hidden or f"it has more than {_DEEPEST} folders in each other"
                continue
            try:
                yield from self._look(folder, waiting)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    self.hidden = self.hidden or f"{folder.name} in it cannot be read"
            yield

    def _look(self, folder: Path, waiting: list[Path]) -> Iterator[None]:
        with jobfiles.folder(folder, root=self._root) as fd, os.scandir(fd) as entries:
            for number, entry in enumerate(entries):
                self._add(entry)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(folder / entry.name)
                if number % _AT_ONCE == 0:
                    yield

    def _add(self, entry: os.DirEntry[str]) -> None:
        try:
            about = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        if about.st_nlink > 1 and not entry.is_dir(follow_symlinks=False):
            if (about.st_dev, about.st_ino) in self._linked:
                return
            if len(self._linked) < _MOST_LINKED:
                self._linked.add((about.st_dev, about.st_ino))
        self.bytes += about.st_blocks * 512


class Disk:
    """Owned by the event loop; looks in threads."""

    def __init__(
        self, book: Book, data: Path, rules: Rules, end: Callable[[int, str], None], clock: Callable[[], float]
    ) -> None:
        """`end`: fails a job, with the reason."""
        self.trouble = ""
        """Why nothing may be accepted."""
        self._book, self._data, self._rules, self._end, self._clock = book, data, rules, end, clock
        self._counts: dict[int, Count] = {}
        self._told_s: dict[int, float] = {}

    async def watch_room(self) -> None:
        """Until cancelled."""
        while True:
            await self.look_for_room()
            await asyncio.sleep(self._rules.room_every_s)

    async def look_for_room(self) -> None:
        try:
            async with asyncio.timeout(_LONGEST_S):
                trouble = short_of(await aside(lambda: room(self._data)), self._rules.reserve_mib)
        except TimeoutError:
            trouble = f"the file system of {self._data} does not answer"
        except OSError as error:
            trouble = f"{self._data}: {error.strerror}"
        if bool(trouble) != bool(self.trouble):
            _log.warning("%s", trouble or f"there is room again on the file system of {self._data}")
        self.trouble = trouble

    async def watch_jobs(self) -> None:
        """Until cancelled. A mistake of ours must not stop it."""
        while True:
            try:
                await self.look_at_jobs()
            except Exception:
                _log.exception("what jobs take of the disk could not be counted")
            await asyncio.sleep(self._rules.every_s)

    async def look_at_jobs(self) -> None:
        """Everybody's count goes on for a moment."""
        running = {active.number: active for active in self._book.lively.values() if active.job.workers}
        for known in (self._counts, self._told_s):
            for number in known.keys() - running.keys():
                del known[number]
        for number, active in sorted(running.items()):
            count = self._counts.get(number)
            if count is None:
                folders = [self._data / "jobs" / active.job.id, self._data / "records" / active.job.id / "logs"]
                count = self._counts[number] = Count(folders, self._data)
            try:
                async with asyncio.timeout(_LONGEST_S):
                    await aside(lambda count=count: count.go_on(time.monotonic() + _SLICE_S))  # type: ignore[misc]
            except TimeoutError:
                # Its thread may still be at it.
                del self._counts[number]
                continue
            self._judge(active, count)
            if count.whole:
                del self._counts[number]

    def _judge(self, active: Active, count: Count) -> None:
        number, most_mib = active.number, bound_mib(active)
        over = over_bound(count, most_mib)
        if self._book.active(number) is not active or not over:
            if count.whole:
                self._told_s.pop(number, None)
            return
        since_s = self._told_s.get(number)
        if since_s is None:
            since_s = self._told_s[number] = self._clock()
            self._book.record(number, e.Warned(text=f"{over}; it will be ended if that goes on"))
        if count.bytes > _FAR * (most_mib << 20) or self._clock() - since_s >= self._rules.grace_s:
            self._end(number, over)


def bound_mib(active: Active) -> int:
    given = active.file.resources.disk
    return DEFAULT_MIB if given is None else given


def over_bound(count: Count, most_mib: int) -> str:
    """In what way it is; empty if it is not, as far as that is known."""
    if count.hidden:
        return f"what its folder holds cannot be counted: {count.hidden}"
    if count.bytes <= most_mib << 20:
        return ""
    return f"its folder and logs take more than {most_mib} MiB of disk (resources.disk)"


def room(folder: Path) -> Room:
    """In a thread: the file system may hang."""
    found = os.statvfs(folder)
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, found.f_favail, found.f_files)


def short_of(there: Room, reserve_mib: int | None) -> str:
    """What there is too little of; empty if there is enough."""
    usual = min(_MOST_RESERVE, int(there.size * _RESERVE_SHARE))
    reserve = usual if reserve_mib is None else reserve_mib << 20
    if there.free < reserve:
        return (
            f"the disk of the data directory has {there.free >> 20} MiB free, "
            f"and {reserve / 2**20:g} MiB are kept for what must be written down"
        )
    if there.files and reserve and there.files_free < min(_RESERVE_FILES, there.files * _FILES_SHARE):
        return f"the disk of the data directory has room for {there.files_free} more files only"
    return ""
