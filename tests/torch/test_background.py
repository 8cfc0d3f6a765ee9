"""The end of a process waits for threads that are inside the framework."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import threading
from stretto.torch import background

began, ended = threading.Event(), []

def second():
    ended.append("second")
    print("second", flush=True)

def first():
    began.set()
    # Only the main thread's end sets this.
    threading.main_thread().join()
    print("first", flush=True)
    background.start("second", second)

background.start("first", first)
began.wait()
{end}
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _SCRIPT.format(end=end)], capture_output=True, text=True, timeout=120)


def test_the_end_waits_for_threads_and_for_those_they_start() -> None:
    done = run("")
    assert (done.returncode, done.stdout.split()) == (0, ["first", "second"]), done.stderr


def test_the_exit_status_is_kept() -> None:
    done = run("raise SystemExit(3)")
    assert (done.returncode, done.stdout.split()) == (3, ["first", "second"]), done.stderr
