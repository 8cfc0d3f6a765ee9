"""Notices that a script makes no steps any more, and says where it is.

The training thread tells where it is (`enter`, `moves`, `step`, `leave`), which costs it next to nothing; the thread
that sends heartbeats looks whether anything has come since it looked last. Only time in which that thread ran counts:
what a frozen process has slept through is nobody's fault.

| place | named after | ended after |
|---|---|---|
| in a loop (`loop`) | max(60 s, 10 median steps) | max(15 min, 30 median steps) |
| in the first pass, which may compile, or in a rehearsal (`first`) | max(15 min, 30 median steps) | never |
| between and after loops (`after`) | max(60 s, 10 median steps) | never |

The seconds can be changed (`limits`). Whoever waits for the others is not to blame: that is told as well, and the
coordinator, which hears all of them, judges.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from stretto.runtime.messages import Stuck

NAMED, ENDED = "STRETTO_STUCK_NAMED_S", "STRETTO_STUCK_ENDED_S"
_NAMED_S, _ENDED_S = 60.0, 900.0
_NAMED_STEPS, _ENDED_STEPS = 10, 30
_REMEMBERED = 63
"""So many steps make the median."""
_LONGEST_GAP_S = 5.0
"""Between two looks; what is beyond it was slept through."""
_FRAMES, _STACK_CHARACTERS = 8, 2000
_OURS = Path(__file__).parent.parent
_WAITING = frozenset(
    str(_OURS / name)
    for name in ("torch/groups.py", "torch/world.py", "torch/transfer.py", "torch/rendezvous.py", "runtime/member.py")
)
"""Where a worker waits for others."""
_LIBRARIES = tuple(
    f"{path}/" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Limits:
    """The shortest times in seconds; 0: never."""

    named_s: float = _NAMED_S
    ended_s: float = _ENDED_S


def limits(given: Mapping[str, str]) -> Limits:
    """As the environment says; `ValueError` for what is no time."""
    return Limits(_seconds(given, NAMED, _NAMED_S), _seconds(given, ENDED, _ENDED_S))


def _seconds(given: Mapping[str, str], name: str, usual_s: float) -> float:
    text = given.get(name, "").strip()
    try:
        seconds = float(text) if text else usual_s
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name} is {text!r}, which is no number of seconds")
    return seconds


_USUAL = Limits()


@dataclass(frozen=True)
class _Mark:
    """Where the training thread was last, and in which thread that is; a new one whenever it moves."""

    place: str
    thread: int


class Watchdog:
    """Of one worker."""

    def __init__(self, clock: Callable[[], float], limits: Limits = _USUAL) -> None:
        self._clock, self.limits = clock, limits
        self.waits: Callable[[], bool] = lambda: False
        """Whether the training thread waits for others though its stack does not show it."""
        self._mark = self._seen = _Mark("", 0)
        self._stepped_s = clock()
        """When the step under way began."""
        self._steps_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._looked_s = clock()
        self._still_s = 0.0
        self._first = True

    # The training thread's side.

    def enter(self) -> None:
        """A loop, or a rehearsal of its body, begins."""
        self._stepped_s = self._clock()
        self.moves()

    def moves(self) -> None:
        """Something was done in the loop."""
        self._mark = _Mark("first" if self._first else "loop", threading.get_ident())

    def step(self) -> None:
        """A step is settled, and the next one begins."""
        now_s = self._clock()
        self._steps_s.append(now_s - self._stepped_s)
        self._stepped_s, self._first = now_s, False
        self.moves()

    def leave(self) -> None:
        """The script is outside of its loops."""
        self._mark = _Mark("after", threading.get_ident())

    # The side of the thread that looks.

    def look(self) -> Stuck | None:
        """What must be said, if the training thread has not moved for too long."""
        now_s, mark = self._clock(), self._mark
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if mark is not self._seen:
            self._seen, self._still_s = mark, 0.0
            return None
        self._still_s += min(gap_s, _LONGEST_GAP_S)
        named_s, ended_s = self._limits_s(mark.place)
        if not mark.place or self._still_s < min(named_s, ended_s):
            return None
        return self._stuck(mark, overdue=self._still_s >= ended_s)

    def in_collective(self) -> bool:
        """Whether the training thread waits for others in a collective at this moment. Asked with every heartbeat: so
        it does not look at that thread's frames, which change while it runs."""
        return self.waits()

    def _limits_s(self, place: str) -> tuple[float, float]:
        """When it is named, and when it is ended."""
        median_s = statistics.median(list(self._steps_s)) if self._steps_s else 0.0
        named_s = _at_least(self.limits.named_s, _NAMED_STEPS * median_s)
        ended_s = _at_least(self.limits.ended_s, _ENDED_STEPS * median_s)
        if place == "loop":
            return named_s, ended_s
        return (max(named_s, ended_s) if place == "first" else named_s), float("inf")

    def _stuck(self, mark: _Mark, *, overdue: bool) -> Stuck:
        frame = sys._current_frames().get(mark.thread)
        frames = list(_outwards(frame))
        return Stuck(
            seconds=self._still_s,
            place=mark.place,
            overdue=overdue,
            waits=_waits(frames) or self.waits(),
            line=_line(frames),
            stack=_stack(frames),
        )


def _at_least(limit_s: float, steps_s: float) -> float:
    return max(limit_s, steps_s) if limit_s else float("inf")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waits(frames: list[FrameType]) -> bool:
    """Whether what it is in, apart from libraries, is a wait of ours."""
    return _innermost(frames) in _WAITING


def _innermost(frames: list[FrameType]) -> str:
    """The file that it is in, apart from libraries."""
    return next((name for frame in frames if not _is_library(name := frame.f_code.co_filename)), "")


def _line(frames: list[FrameType]) -> str:
    """The innermost line of the user's script."""
    theirs = (frame for frame in frames if _is_users(frame.f_code.co_filename))
    found = next(theirs, frames[0] if frames else None)
    return _told(found) if found is not None else ""


def _stack(frames: list[FrameType]) -> tuple[str, ...]:
    """The innermost last, as tracebacks have it."""
    told: list[str] = []
    for frame in frames[:_FRAMES]:
        told.insert(0, _told(frame))
        if sum(map(len, told)) > _STACK_CHARACTERS:
            del told[0]
            break
    return tuple(told)


def _is_ours(path: str) -> bool:
    return path.startswith(f"{_OURS}/")


def _is_library(path: str) -> bool:
    return not _is_ours(path) and path.startswith((*_LIBRARIES, "<"))


def _is_users(path: str) -> bool:
    return not _is_library(path) and not _is_ours(path)


def _told(frame: FrameType) -> str:
    code = frame.f_code
    return f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}"[-_STACK_CHARACTERS // _FRAMES :]


def _short(path: str) -> str:
    """As seen from the script's working folder, where it is in there."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path
