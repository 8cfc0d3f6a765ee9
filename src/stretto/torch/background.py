"""Threads that work inside the framework, and the end of the process.

A thread that comes back from the framework's own code into an interpreter that is ending takes the whole process down
with SIGABRT. So the end waits for those that are under way; what hangs for good is left behind, and never comes back.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_AT_MOST_S = 5.0

_running: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, work: Callable[..., Any], *arguments: Any) -> threading.Thread:
    """A thread that does not keep the process alive, but is waited for at its end."""
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    _running.add(thread)
    thread.start()
    return thread


def _wait() -> None:
    """They may start others, so until none is left."""
    deadline_s = time.monotonic() + _AT_MOST_S
    while time.monotonic() < deadline_s and (alive := [thread for thread in _running if thread.is_alive()]):
        alive[0].join(deadline_s - time.monotonic())


atexit.register(_wait)
