"""Whether a script that goes out of its loop goes on, or ends there by `SystemExit`, which nobody gets to see.

Python has no hook for a script that ends so, and to a loop it looks like `break`: whatever the reason is, the loop is
let go of. What can be seen is the code that lets go of it. After `break`, `return` or the end of a function it is at an
instruction that takes something away; otherwise an exception has struck it at another one, and if that is a
`SystemExit`, it exists.
"""

from __future__ import annotations

import dis
import gc
import os
import sys
import threading
from inspect import CO_GENERATOR
from types import FrameType, ModuleType
from typing import Any, NoReturn

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TAKES_AWAY = ("POP_", "END_", "RETURN", "STORE_", "DELETE_")
"""How the names of instructions begin that let go of a loop without an exception."""
_WAITS = ("YIELD_VALUE", "RESUME")
"""Where a generator is that somebody else goes through."""


class Departures:
    """From the loops of one script."""

    def __init__(self) -> None:
        self._script = _script()

    def ended_by_exit(self) -> bool:
        """At the end of a process without an error: whether its script did not come to its own end."""
        return self._script is not None and not _at(self._script).startswith("RETURN")

    def by_exit(self) -> bool:
        """Asked while a loop is let go of."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (_is_ours(frame) or _is_closed(frame)):
            frame = frame.f_back
        if frame is None:
            # It was let go of with the script.
            return self.ended_by_exit()
        if _at(frame).startswith(_TAKES_AWAY):
            return False
        return any(issubclass(type(one), SystemExit) for one in gc.get_objects())


def make_exits_seen() -> None:
    """Before Python 3.12 `sys.exit` makes no object until somebody catches it; what replaces it does, also where a
    module has imported it by name."""
    if sys.version_info >= (3, 12) or sys.exit is _exit:
        return
    plain = sys.exit
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            # A module that is read when it is first used must not be read for this.
            names = ModuleType.__getattribute__(module, "__dict__")
            every = names if names.get("__name__") == "__main__" else ("exit",)
            for name in [name for name in every if names.get(name) is plain]:
                names[name] = _exit


def _exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status)."""
    raise SystemExit(status)


def _script() -> FrameType | None:
    """The frame of the script itself; of the thread that is not the main one nothing is known."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    main = vars(sys.modules["__main__"])
    while frame is not None and not (frame.f_globals is main and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_closed(frame: FrameType) -> bool:
    """Whether it is a generator that goes through a loop for somebody else, who lets go of it."""
    return bool(frame.f_code.co_flags & CO_GENERATOR) and _at(frame) in _WAITS


def _at(frame: FrameType) -> str:
    """The instruction at which it is, or was when it ended."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
