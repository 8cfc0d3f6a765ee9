"""Following one job to its end: its log on standard output, a progress line on standard error, Ctrl-C.

Ctrl-C is taken between two pieces of the log, never in the middle of a call. The first one asks, at a terminal,
whether to cancel the job or to leave it to itself; elsewhere it cancels. One more cancels at once, another one leaves
without waiting for the end.

Who reads the log may leave before the end (`| head`): the job is followed all the same, for its exit code.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stretto import visible
from stretto.cli import show, streams, words
from stretto.errors import Conflict, Unavailable

if TYPE_CHECKING:
    from stretto.client import Client, Job, Piece

_TICK_S = 0.2
_LOOK_S = 1.0
INTERRUPTED = 130


def exit_code(job: Job) -> int:
    """What a shell should hear: the job's own exit code as far as it has one."""
    if job.succeeded:
        return 0
    if job.phase == "cancelled":
        return INTERRUPTED
    return job.exit_code if job.exit_code and 0 < job.exit_code < 256 else 1


def follow(client: Client, job: Job, json: bool) -> int:
    """Until its end, or until the person at the terminal leaves; gives the exit code."""
    screen = Screen(job, json)
    with _counting() as interrupts:
        try:
            for piece in client.follow(job, tick_s=_TICK_S):
                screen.show(piece)
                screen.look(client)
                if interrupts.count > interrupts.answered and not _interrupted(client, job, screen, interrupts):
                    return INTERRUPTED
        finally:
            screen.finish()
        ended = client.wait(job)
    if json:
        with streams.unread(sys.stdout):
            show.as_json({"job": ended})
    show.note(words.outcome(ended))
    return exit_code(ended)


class Interrupts:
    def __init__(self) -> None:
        self.count = 0
        self.answered = 0


@contextmanager
def _counting() -> Iterator[Interrupts]:
    """SIGINT and SIGTERM are counted while this lasts, and nothing else."""
    seen = Interrupts()

    def more(*_: object) -> None:
        seen.count += 1

    before = {number: signal.signal(number, more) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(client: Client, job: Job, screen: Screen, interrupts: Interrupts) -> bool:
    """Whether to go on following."""
    screen.clear()
    if screen.cancelled:
        show.note(f"left while job {job.id} is being cancelled")
        return False
    if interrupts.count == 1 and sys.stdin.isatty() and sys.stderr.isatty() and _wants_to_leave(job, interrupts):
        show.note(f"{words.title(job)} goes on; `stretto logs -f {job.id}` follows it")
        return False
    screen.cancelled = True
    interrupts.answered = interrupts.count  # One more while the server is told counts.
    show.note(f"cancelling {words.title(job)}; Ctrl-C again leaves at once")
    try:
        client.cancel(job)
    except Conflict:
        pass  # It has ended meanwhile.
    except Unavailable as error:
        show.note(f"error: {error}")
        return False
    return True


def _wants_to_leave(job: Job, interrupts: Interrupts) -> bool:
    """Asks; another Ctrl-C, or no answer at all, means no."""
    print(f"\n{words.title(job)}: [c]ancel it, or [d]etach and let it run? ", end="", file=sys.stderr, flush=True)
    while interrupts.count == 1:
        if not select.select([sys.stdin], [], [], _TICK_S)[0]:
            continue
        answer = sys.stdin.readline().strip().lower()
        if answer in ("d", "detach"):
            return True
        if answer in ("c", "cancel", "y", "yes", ""):
            return False
        print("c or d? ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return False


class Screen:
    """The log, and a line below it that is drawn again and again."""

    def __init__(self, job: Job, json: bool) -> None:
        self.cancelled = False
        self._job, self._json = job, json
        self._live = sys.stderr.isatty()
        self._lines = Lines(prefixed=job.max_workers > 1)
        self._text = visible.Coloured()
        self._looked_s = 0.0
        self._drawn = False

    def show(self, piece: Piece) -> None:
        if not piece.text:
            return
        self.clear()
        with streams.unread(sys.stdout):
            if self._json:
                show.as_json({"worker": piece.worker, "text": piece.text})
            else:
                visible.behind(sys.stdout).write(self._text.add(self._lines.add(piece.worker, piece.text)))
            sys.stdout.flush()

    def look(self, client: Client) -> None:
        """Once a second, at a terminal: how far it is."""
        now_s = time.monotonic()
        if not self._live or now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        try:
            self._job = client.job(self._job)
        except Unavailable:
            self._draw("the server does not answer; waiting for it")
            return
        self._draw(progress_line(self._job))

    def clear(self) -> None:
        if self._drawn:
            visible.behind(sys.stderr).write("\r\x1b[2K")
            sys.stderr.flush()
            self._drawn = False

    def finish(self) -> None:
        self.clear()
        rest = self._text.add(self._lines.rest()) + self._text.rest()
        if rest and not self._json:
            with streams.unread(sys.stdout):
                visible.behind(sys.stdout).write(rest)
                sys.stdout.flush()

    def _draw(self, line: str) -> None:
        import shutil

        width = shutil.get_terminal_size().columns - 1
        visible.behind(sys.stderr).write(f"\r\x1b[2K\x1b[2m{visible.in_line(line)[:width]}\x1b[0m")
        sys.stderr.flush()
        self._drawn = True


class Lines:
    """Pieces of several logs, put together line by line so that no line is torn; with the worker's name before each."""

    def __init__(self, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._open: dict[str, str] = {}

    def add(self, worker: str, text: str) -> str:
        if not self._prefixed:
            return text
        *whole, rest = (self._open.pop(worker, "") + text).split("\n")
        if rest:
            self._open[worker] = rest
        return "".join(f"{worker} | {line}\n" for line in whole)

    def rest(self) -> str:
        """Last lines that had no end."""
        left, self._open = self._open, {}
        return "".join(f"{worker} | {line}\n" for worker, line in left.items())


def progress_line(job: Any) -> str:
    parts = [words.phase(job), f"{words.size(job)} workers"]
    if job.get("total_steps"):
        share = job["steps"] / job["total_steps"]
        parts.append(f"{words.bar(share, 16)} {words.progress(job)}")
    elif job.get("steps"):
        parts.append(f"step {job['steps']}")
    parts += [f"{words.rate(job)} steps/s"] if job.get("rate") else []
    parts += [f"{words.span(job['eta_s'])} left"] if job.get("eta_s") is not None else []
    parts += [job["text"]] if job["phase"] == "queued" and job.get("text") else []
    return f"{job['name']}: " + " · ".join(parts)
