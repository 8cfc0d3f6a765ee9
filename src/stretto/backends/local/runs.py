"""Run directories: what is on disk of every launch, as the server sees it.

`supervisor.py` tells which files there are. The rule that makes a crash at any instruction harmless: whoever holds a
run directory's lock decides. A supervisor that has it starts the worker, unless an exit was written before; anybody
else who gets it writes the exit, and so no supervisor that comes later will start anything.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stretto import jobfiles
from stretto.accounts import Identity
from stretto.backends.local import containment, supervisor
from stretto.backends.local.forkserver import limits, umask
from stretto.backends.protocol import SHELL, Exit, Launch
from stretto.errors import StrettoError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_LONGEST_ID = 64
_MOST_RUNS = 1_000_000
_LARGEST_STATUS = 255
_LONGEST_TEXT = 10_000

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); import supervisor; supervisor.main()"
"""Not the file itself: as a module it is compiled only once."""


class FolderInUse(StrettoError):
    """Another server works in this data directory."""

    code = "folder-in-use"


class Running(NamedTuple):
    """Who lives, as the supervisor wrote it down."""

    pid: int
    start: int
    worker: int
    worker_start: int


class Runs:
    """All run directories of a data directory."""

    def __init__(self, folder: Path) -> None:
        self.data = Path(os.path.abspath(folder))
        self.folder = self.data / "runs"
        self.server_lock = server_lock(self.data)

    @property
    def group_name(self) -> str:
        """Of the control groups of this data directory: the same for everybody who opens it."""
        return f"stretto-{self.owner[:12]}"

    @functools.cached_property
    def owner(self) -> str:
        """Whose launches these are: by the folder itself too, as containers may share processes, but no paths."""
        try:
            about = os.stat(self.data)
            place = about.st_dev, about.st_ino
        except OSError:
            place = 0, 0
        return hashlib.sha256(repr((os.path.realpath(self.data), *place)).encode()).hexdigest()[:16]

    def mark(self, launch: str) -> str:
        """In the environment of each of its processes; written down with the launch, and read from there later."""
        return containment.mark_of(launch, self.owner)

    def path(self, launch: str) -> Path:
        """Raises `ValueError` for what is no launch id: it might lead out of the folder."""
        if not _ID.fullmatch(launch) or len(launch) > _LONGEST_ID:
            raise ValueError(f"{launch!r} is not a launch id")
        return self.folder / launch

    def all(self) -> list[str]:
        """Whose directories exist. Removals that were interrupted are completed."""
        if not self.folder.is_dir():
            return []
        jobfiles.remove_gone(self.folder)
        names = sorted(jobfiles.names(self.folder, _MOST_RUNS))
        return [name for name in names if _ID.fullmatch(name)]

    def create(
        self,
        launch: Launch,
        env: Mapping[str, str],
        affinity: tuple[int, ...],
        who: Identity | None = None,
        **words: Any,
    ) -> Path:
        """Make the directory with its `launch.json`.

        They survive the server, which is enough: were the power lost, nothing of the launch would run any more, and
        without a directory it is reported as lost. So nobody has to wait for the disk.
        """
        path = self.path(launch.id)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        about = {
            "id": launch.id,
            "job": launch.job,
            "worker": launch.worker,
            "command": launch.command,
            "shell": launch.command[:2] == SHELL,
            "cwd": launch.cwd,
            "env": {**env, containment.MARK: words["box"]["mark"]},
            "log": launch.log,
            "grace_s": launch.grace_s,
            "affinity": affinity,
            "umask": umask(),
            "limits": limits(),
            "account": None if who is None else who._asdict(),
            "server_lock": str(self.server_lock),
            **words,
        }
        try:
            supervisor.write(str(path), supervisor.LAUNCH, about, durable=False)
        except OSError:
            jobfiles.remove(path, root=self.folder)
            raise
        return path

    def running(self, launch: str) -> Running | None:
        """None, too, if what is there is not what a supervisor writes."""
        words = supervisor.read(str(self.path(launch)), supervisor.RUNNING)
        try:
            return msgspec.convert([words[name] for name in Running._fields], Running) if words else None
        except (KeyError, msgspec.ValidationError):
            return None

    def exit(self, launch: str) -> Exit | None:
        """The same."""
        words = supervisor.read(str(self.path(launch)), supervisor.EXIT)
        try:
            exit = msgspec.convert({**words, "launch": launch}, Exit) if words else None
        except msgspec.ValidationError:
            return None
        if exit is None or not 0 <= exit.status <= _LARGEST_STATUS or not math.isfinite(exit.at_s):
            return None
        return msgspec.structs.replace(exit, text=exit.text[:_LONGEST_TEXT].encode(errors="replace").decode())

    def order(self, launch: str, what: str) -> None:
        """Write down what the supervisor is to do; it looks when it is woken, and at every tick."""
        with contextlib.suppress(FileNotFoundError):
            jobfiles.append(self.path(launch) / supervisor.ORDERS, f"{what}\n".encode())

    def asked(self, launch: str) -> bool:
        with contextlib.suppress(OSError):
            return os.stat(self.path(launch) / supervisor.ORDERS).st_size > 0
        return False

    def give_up(self, launch: str, at_s: float) -> Exit | None:
        """End what is left of a launch without a supervisor, and write its exit. None: it has one.

        Ask only about launches whose supervisor was started by a server that is gone, or has been seen to end: one that
        is just coming finds the lock taken or the exit written, and starts nothing.
        """
        path = str(self.path(launch))
        came = os.path.lexists(os.path.join(path, supervisor.LOCK))
        try:
            lock: int | None = supervisor.take(path)
        except jobfiles.Spoilt:
            # Somebody has put something else in its place. Whoever holds it, or not, is ended.
            lock = None
        if lock is not None and lock < 0:
            return None if os.path.isdir(path) else lost(launch, "it was never started", at_s, never=True)
        try:
            if (written := self.exit(launch)) is not None:
                return written
            running = self.running(launch)
            if (box := self._box(launch)) is not None:
                session, since = (running.worker, running.worker_start) if running else (0, 0)
                noted = supervisor.read(path, supervisor.TREE) or {}
                box.end(session, since, _tree(noted.get("tree")))
            text = f"its supervisor, process {running.pid}, died" if running else "its supervisor never came"
            asked = self.asked(launch)
            exit = lost(launch, text + self._complaint(launch), at_s, asked=asked, never=not (came or running or asked))
            supervisor.write(path, supervisor.EXIT, _words(exit))
            return exit
        finally:
            if lock is not None:
                os.close(lock)

    def remove(self, launch: str) -> None:
        """Take the directory away: all at once for anybody who looks, then piece by piece. And its control groups."""
        path = self.path(launch)
        if (box := self._box(launch)) is not None:
            box.remove()
        jobfiles.remove(path, root=self.folder)

    def _box(self, launch: str) -> containment.Box | None:
        """The control groups of a launch, if they can still be read."""
        words = supervisor.read(str(self.path(launch)), supervisor.LAUNCH)
        try:
            return None if words is None else containment.Box(words["box"])
        except (KeyError, TypeError):
            return None

    def _complaint(self, launch: str, most: int = 300) -> str:
        with contextlib.suppress(OSError):
            end = jobfiles.read_end(self.path(launch) / supervisor.OWN_LOG, 4 * most)
            text = end.decode(errors="replace").strip()
            return f": {text[-most:]}" if text else ""
        return ""


def lost(launch: str, text: str, at_s: float, *, asked: bool = False, never: bool = False) -> Exit:
    return Exit(launch=launch, how="lost", text=text, at_s=at_s, asked=asked, never=never)


def server_lock(data: Path) -> Path:
    """The file whose lock says that a server works in this data directory."""
    return Path(os.path.abspath(data)) / "lock"


@contextlib.contextmanager
def serving(data: Path, patience_s: float = 2.0) -> Iterator[None]:
    """Hold the data directory. Supervisors look at its lock for an instant each, which must not look like a server."""
    data.mkdir(parents=True, exist_ok=True)
    fd = jobfiles.opened(server_lock(data), os.O_RDWR | os.O_CREAT)
    try:
        _lock_patiently(fd, data, patience_s)
        yield
    finally:
        os.close(fd)


def _lock_patiently(fd: int, data: Path, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                text = f"another server works in {data}"
                raise FolderInUse(text, hint="stop it, or give another data directory") from None
        time.sleep(0.01)


def spawn(path: Path, ready: int, why: str, asking: tuple[int, ...] = ()) -> int:
    """Start the supervisor as a program of its own, in a session of its own; its process number. `asking`: a connection
    to the fork server that is to make the worker, and the request."""
    here = str(Path(__file__).parent)
    log = own_log(path)
    try:
        with _aside((ready, *asking)) as fds:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-c", BOOT, here, str(path), f"{FIRST_FD},{len(asking)}", why],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                    *((os.POSIX_SPAWN_DUP2, fd, FIRST_FD + number) for number, fd in enumerate(fds)),
                ],
                setsid=True,
                setsigmask=(),
            )
    finally:
        os.close(log)


FIRST_FD = 3


@contextlib.contextmanager
def _aside(fds: tuple[int, ...]) -> Iterator[list[int]]:
    """None of them may be where another is to go: copies where none is. One alone needs no room."""
    copies: list[int] = []
    try:
        if fds[1:]:
            copies += (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD + len(fds)) for fd in fds)
        yield copies or list(fds)
    finally:
        for copy in copies:
            os.close(copy)


def own_log(path: Path) -> int:
    """A descriptor for what the supervisor of a run directory has to complain about."""
    return jobfiles.opened(path / supervisor.OWN_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def log_start(fd: int) -> int:
    """Where the text of a bounded log begins: what was before has been given back to the disk."""
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except OSError:
        return 0


def _tree(noted: Any) -> list[tuple[int, int]]:
    """What a supervisor wrote down of its descendants; nothing, if it was somebody else."""
    try:
        return msgspec.convert(noted, list[tuple[int, int]])
    except msgspec.ValidationError:
        return []


def _words(exit: Exit) -> dict[str, Any]:
    words = {"how": exit.how, "status": exit.status, "text": exit.text, "at_s": exit.at_s, "asked": exit.asked}
    return {**words, "never": True} if exit.never else words
