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
import sysconfig
import threading
from collections.abc import Callable
from enum import Enum
from inspect import CO_GENERATOR
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PLACES = ("FAST", "NAME", "GLOBAL", "DEREF")
_TAKES_AWAY = (
    "POP_TOP",
    "POP_ITER",
    "END_",
    "RETURN",
    *(f"{act}_{place}" for act in ("STORE", "DELETE") for place in _PLACES),
)
"""How the names of instructions begin that let go of a loop without an exception."""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OWN_REFERENCES = 3
"""To `sys.exit` when nobody has kept it: a variable of ours, the call that counts, the interpreter."""
_WAITS = ("YIELD_VALUE", "RESUME")
"""Where a generator is that somebody else goes through."""


class Departure(Enum):
    """How a script goes out of a loop."""

    BREAK = "by its own way"
    ERROR = "by an exception"
    EXIT = "by SystemExit"


class Departures:
    """From the loops of one script."""

    def __init__(self) -> None:
        self._script = _script()
        self._asked_at = -1
        """The script's instruction by which it asked for a batch last."""

    def asks(self) -> None:
        """For a batch."""
        if self._script is not None:
            self._asked_at = self._script.f_lasti

    def ended_in_body(self) -> bool:
        """At the end of a process without an error, where somebody still holds the loop, and has taken its batches one
        by one: whether the script ended where it works on them. What happens in one call of the script looks alike."""
        if self._script is None or not self.ended_by_exit():
            return False
        at = self._script.f_lasti
        return self._asked_at in (-1, at) or _are_in_one_loop(self._script.f_code, self._asked_at, at)

    def ended_by_exit(self) -> bool:
        """At the end of a process without an error: whether its script did not come to its own end."""
        return self._script is not None and not _at(self._script).startswith("RETURN")

    def departure(self) -> Departure:
        """Asked while a loop is let go of."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (_is_ours(frame) or _is_closed(frame)):
            frame = frame.f_back
        if frame is None:
            # It was let go of with the script.
            return Departure.EXIT if self.ended_by_exit() else Departure.BREAK
        if _at(frame).startswith(_TAKES_AWAY):
            return Departure.BREAK
        exits = any(issubclass(type(one), SystemExit) for one in gc.get_objects())
        return Departure.EXIT if exits else Departure.ERROR


def _are_in_one_loop(code: CodeType, one: int, other: int) -> bool:
    """Two instructions, by the lines of the loops around the first."""
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
    for jump in dis.get_instructions(code):
        if "JUMP_BACKWARD" in jump.opname and jump.argval <= one <= jump.offset:
            inside = [line for offset in range(jump.argval, jump.offset, 2) if (line := lines.get(offset)) is not None]
            if min(inside, default=0) <= (lines.get(other) or 0) <= max(inside, default=-1):
                return True
    return False


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
            every = names if _is_a_users(names) else ("exit",)
            for name in [name for name in every if names.get(name) is plain]:
                names[name] = _exit
    if sys.getrefcount(plain) > _OWN_REFERENCES:
        _replace_everywhere(plain)


def _replace_everywhere(plain: Callable[..., Any]) -> None:
    """Somebody has kept it: in a table, an object, or as what a function does if nothing else is said."""
    for holder in gc.get_referrers(plain):
        if isinstance(holder, dict):
            holder.update({key: _exit for key, value in holder.items() if value is plain})
        elif isinstance(holder, list):
            holder[:] = [_exit if value is plain else value for value in holder]
        elif isinstance(holder, tuple):
            for function in gc.get_referrers(holder):
                if isinstance(function, FunctionType) and function.__defaults__ is holder:
                    function.__defaults__ = tuple(_exit if value is plain else value for value in holder)


def _is_a_users(names: dict[str, Any]) -> bool:
    """The names of a module that was not installed."""
    place = names.get("__file__")
    return not isinstance(place, str) or not place.startswith(_INSTALLED)


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
