"""Start one worker process: a fork of a warm interpreter where that is possible, a new program where it is not.

Either way the worker leads a process group of its own, reads nothing, writes to its log, and dies with the process that
launched it. What is left of its group when it ends is killed; nothing stays behind as a zombie. `Process` tells how it
was started, and why if it was not a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto.backends.local.forkserver import Forked, ForkFailed, ForkServer
from stretto.errors import UsageError

_GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""
"""Asks to be killed when its parent dies, then becomes the command: between fork and exec of a process that may have
threads no Python code may run."""


def launch(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    log: str | os.PathLike[str] | int | None = None,
    warm: ForkServer | None = None,
) -> Process:
    """Start the command. Output goes to the end of the file `log`, to that descriptor, or where ours goes.

    Raises `UsageError` when there is no such folder or program.
    """
    env = dict(os.environ if env is None else env)
    folder = os.path.abspath(os.getcwd() if cwd is None else cwd)
    _check(command, env, folder)
    with _stdio(log) as stdio:
        why = "no fork server was given" if warm is None else warm.refusal(command, env, folder)
        if warm is not None and not why:
            try:
                return _ForkedProcess(warm.fork(command, env, folder, stdio))
            except ForkFailed as error:
                why = error.message
        return _PlainProcess(_spawn(command, env, folder, stdio), why)


class Process(ABC):
    """A worker that was started. `exit_status` is its exit code, or minus the signal that ended it."""

    def __init__(self, pid: int, pidfd: int, news: int, how: str, why: str) -> None:
        self.pid = pid
        self.how = how
        """`forked` or `plain`."""
        self.why = why
        """Why it was not forked; empty when it was."""
        self.exit_status: int | None = None
        self._pidfd = pidfd
        self._news = news

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended; -1 after its status was taken."""
        return self._news

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.exit_status is None and _readable(self._news, 0.0):
            self.exit_status = self._collect()
            self._release()
        return self.exit_status

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end; raises `TimeoutError`."""
        if self.exit_status is None:
            _readable(self._news, timeout_s)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
        return status

    def signal(self, number: int) -> None:
        """Signal the worker itself, not its group: one that saves its state may still need its data loaders."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it; its group follows when its status is collected."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
        self.kill()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _collect(self) -> int:
        """The exit status of the process, which has ended."""

    def _release(self) -> None:
        os.close(self._pidfd)
        self._pidfd = self._news = -1


class _ForkedProcess(Process):
    """The fork server is its parent and sends the status."""

    def __init__(self, forked: Forked) -> None:
        super().__init__(forked.pid, forked.pidfd, forked.connection.fileno(), "forked", "")
        self._connection = forked.connection

    def _collect(self) -> int:
        with contextlib.suppress(OSError):
            if data := self._connection.recv(4096):
                return int(json.loads(data)["exit_status"])
        # The server died, and the worker with it; nobody else would end the rest of its group.
        _kill_group(self.pid)
        _readable(self._pidfd, None)
        return -signal.SIGKILL

    def _release(self) -> None:
        super()._release()
        self._connection.close()


class _PlainProcess(Process):
    """A child of ours."""

    def __init__(self, child: subprocess.Popen[bytes], why: str) -> None:
        pidfd = os.pidfd_open(child.pid)
        super().__init__(child.pid, pidfd, pidfd, "plain", why)
        self._child = child

    def _collect(self) -> int:
        # Before the leader is collected its number, which names the group, cannot be anybody else's.
        _kill_group(self.pid)
        return self._child.wait()


def _check(command: Sequence[str], env: Mapping[str, str], folder: str) -> None:
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {folder} to run in", hint="give an existing working directory")
    if not command:
        raise UsageError("there is no command to run", hint="give a program and its arguments")
    name = os.path.join(folder, command[0]) if "/" in command[0] else command[0]
    if shutil.which(name, path=env.get("PATH", os.defpath)) is None:
        raise UsageError(f"there is no program {command[0]!r}", hint="give its full path, or put its folder on PATH")


@contextlib.contextmanager
def _stdio(log: str | os.PathLike[str] | int | None) -> Iterator[tuple[int, int, int]]:
    with contextlib.ExitStack() as stack:
        nothing = stack.enter_context(open(os.devnull)).fileno()
        if log is None:
            yield nothing, 1, 2
        elif isinstance(log, int):
            yield nothing, log, log
        else:
            file = stack.enter_context(open(Path(log), "ab")).fileno()
            yield nothing, file, file


_spawner: ThreadPoolExecutor | None = None


def _spawn(
    command: Sequence[str], env: Mapping[str, str], folder: str, stdio: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    """Start the guard from a thread that lives as long as we do: to Linux the parent that dies is a thread."""
    global _spawner
    if _spawner is None:
        _spawner = ThreadPoolExecutor(1, "stretto-launch")
    guarded = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]
    return _spawner.submit(
        subprocess.Popen,
        guarded,
        env=env,
        cwd=folder,
        stdin=stdio[0],
        stdout=stdio[1],
        stderr=stdio[2],
        start_new_session=True,
    ).result()


def _forget_spawner() -> None:
    global _spawner
    _spawner = None


os.register_at_fork(after_in_child=_forget_spawner)


def _readable(fd: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
