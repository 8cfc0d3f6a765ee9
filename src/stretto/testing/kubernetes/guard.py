"""What undoes a test bed, however the process that made it ends.

A guard is a process of its own that is told of everything that must not be left behind: processes, folders, cgroups,
and commands that undo others. When its input ends (the test bed is closed, or its process was killed, or crashed) it
undoes them, the latest first, and ends. So there is one way down, and every run takes it.

It is started by its path, because importing the package would take longer than all the rest it does.
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
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
DEADLINE_S = 10.0


class Guard:
    """The near side: tells the guard what to undo, and waits until it knows."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip

    def process(self, pid: int, grace_s: float = 5.0) -> None:
        """End it: by SIGTERM, and by SIGKILL when the grace (if there is any) is over."""
        self._tell(kind="process", pid=pid, grace_s=grace_s)

    def folder(self, path: Path) -> None:
        self._tell(kind="folder", path=str(path))

    def command(self, *words: str) -> None:
        """It may fail: what it undoes may be gone."""
        self._tell(kind="command", words=words)

    def cgroup(self, name: str) -> None:
        """Kill who is inside, and remove it from every hierarchy."""
        self._tell(kind="cgroup", name=name)

    def close(self) -> None:
        """Undo everything, and return when it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        if self._process.stdout.readline() != "known\n":
            raise RuntimeError(f"the guard of the test bed is gone: it cannot undo {what}")


def main() -> None:
    """The far side."""
    undo: list[Callable[[], None]] = []
    for line in sys.stdin:
        undo.append(_undoing(json.loads(line)))
        print("known", flush=True)
    for step in reversed(undo):
        try:
            step()
        except Exception as error:
            print(f"the guard of a test bed could not undo a step: {error}", file=sys.stderr)


def _undoing(what: dict[str, Any]) -> Callable[[], None]:
    match what["kind"]:
        case "process":
            return _process(what["pid"], what["grace_s"])
        case "folder":
            return lambda: shutil.rmtree(what["path"], ignore_errors=True)
        case "command":
            return lambda: _command(what["words"])
        case _:
            return lambda: _cgroup(what["name"])


def _process(pid: int, grace_s: float) -> Callable[[], None]:
    """Its descriptor is taken now: a number may be somebody else's later."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: None

    def end() -> None:
        steps = [(signal.SIGTERM, grace_s)] if grace_s else []
        for number, wait_s in (*steps, (signal.SIGKILL, DEADLINE_S)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], wait_s)[0]:
                return

    return end


def _command(words: Sequence[str]) -> None:
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _cgroup(name: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while (roots := cgroup_folders(name)) and time.monotonic() < end_s:
        for root in roots:
            for folder, _, _ in os.walk(root, topdown=False):
                _empty(Path(folder))
        time.sleep(0.02)


def cgroup_folders(name: str) -> list[Path]:
    """Where a cgroup of this name is: one folder in a unified hierarchy, one per controller in the older ones."""
    return [path for path in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")) if path.is_dir()]


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        folder.rmdir()


if __name__ == "__main__":
    main()
