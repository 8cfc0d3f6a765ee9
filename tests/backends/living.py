"""Which processes live, and waiting for a condition."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

_MARK = f"STRETTO_TEST_RUN={uuid.uuid4().hex}"
os.environ.update([_MARK.split("=")])


def wait_until(what: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"still not so after {timeout_s} s"
        time.sleep(0.005)


def ours() -> set[int]:
    """The processes that this test run started, wherever they hang in the tree; forks show their server's variables."""
    return {int(entry) for entry in os.listdir("/proc") if entry.isdecimal() and _is_ours(entry)}


def _is_ours(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
        zombie_child = stat[0] == "Z" and int(stat[1]) == os.getpid()
        marked = _MARK.encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
    return zombie_child or (marked and int(pid) != os.getpid())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
