"""How results reach a person: tables on standard output, progress on standard error."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stretto import visible
from stretto.cli import streams

if TYPE_CHECKING:
    from stretto.sim.engine import Progress

_PATIENCE_S = 1.0
"""A run shorter than this needs no progress bar."""


def as_json(value: Any) -> None:
    """One JSON document, strict: no NaN, no Infinity."""
    print(visible.as_json(json.dumps(value, allow_nan=False, ensure_ascii=False, indent=None)))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """A table, the first column to the left and figures to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=Text(visible.in_line(title)) if title else None, title_justify="left", box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        shown.add_column(Text(heading), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(visible.visible(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(shown)


def columns(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table in plain text, which costs nothing to print; at a terminal its last column ends where the line does."""
    rows = [[visible.in_line(cell) for cell in row] for row in rows]
    wide = [max([len(heading), *(len(row[i]) for row in rows)]) for i, heading in enumerate(headings)]
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10**6
    for row in [headings, *rows]:
        cells = [
            cell.rjust(width) if heading in right else cell.ljust(width)
            for cell, width, heading in zip(row, wide, headings, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        print(line if len(line) <= most else line[: most - 1] + "…")


def note(text: str) -> None:
    """Something beside the result."""
    with streams.unread(sys.stderr):
        print(text, file=sys.stderr)


def now_s() -> float:
    """Of this machine's clock, for `3m12s ago`."""
    return time.time()  # noqa: TID251


def listing(pairs: Sequence[tuple[str, str]]) -> None:
    """Names and values, one pair per line."""
    wide = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        lines = value.rstrip().replace("\n", "\n" + " " * (wide + 2))
        print(f"{name:<{wide}}  {lines}".rstrip())


@contextmanager
def progress(what: str) -> Iterator[Progress | None]:
    """A bar on standard error for runs that last; nothing when that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=None)
    began, running = time.monotonic(), False

    def report(done: int, total: int) -> None:
        nonlocal running
        if not running and time.monotonic() - began > _PATIENCE_S:
            bar.start()
            running = True
        if running:
            bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if running:
            bar.stop()
