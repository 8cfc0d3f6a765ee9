"""Trace formats, a file each. This table is the one list of names; modules load on first use.

A reader module has `read(path, options) -> Trace` and `Options`, the struct of what `--set` may say to it.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from stretto.core import options
from stretto.errors import TraceError, unknown
from stretto.sim import files
from stretto.sim.trace import Trace

_HERE = "stretto.sim.readers."

FORMATS: dict[str, str] = {
    "tiresias": _HERE + "tiresias",
    "philly": _HERE + "philly",
    "itp": _HERE + "itp",
    "pollux": _HERE + "pollux",
    "elasticflow": _HERE + "elasticflow",
    "gavel": _HERE + "gavel",
    "csv": _HERE + "plain",
}


NEVER = "never"
"""How a checkpoint interval says that nothing is saved."""


def module(format: str) -> Any:
    """The reader module of that format."""
    if format not in FORMATS:
        raise unknown("trace format", format, list(FORMATS))
    return importlib.import_module(FORMATS[format])


def option_names(format: str) -> list[str]:
    """What `--set` may say to this reader."""
    return list(module(format).Options.__struct_fields__)


def read(path: Path, format: str, settings: Mapping[str, Any] | None = None) -> Trace:
    """Read a trace file, or raise `TraceError` naming the row and column."""
    reader = module(format)
    files.check(path, "trace file", hint="give the path of a readable file")
    chosen = options.read(reader.Options, settings or {}, f"format {format}", hint="docs/traces.md lists its options")
    trace: Trace = reader.read(path, chosen)
    return trace


class Rows:
    """A CSV file with a header, read as text; cells are converted on demand, errors name row and column."""

    def __init__(self, path: Path, required: Sequence[str]) -> None:
        self.name = path.name
        self.lines: list[dict[str, str]] = []
        self.numbers: list[int] = []
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                reader.fieldnames = self.header = [name.strip() for name in reader.fieldnames or ()]
                self._check_header(required)
                for line in reader:
                    self._add(reader.line_num, line)
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"trace {self.name!r} is not a CSV text file: {error}", hint="check the file") from None

    def _check_header(self, required: Sequence[str]) -> None:
        missing = [column for column in required if column not in self.header]
        if missing:
            has = ", ".join(repr(name)[1:-1] for name in self.header)
            raise TraceError(
                f"trace {self.name!r}: column {', '.join(missing)} is missing",
                hint=f"the file has: {has[:200] or 'no header'}",
            )
        twice = [column for column in self.header if column and self.header.count(column) > 1]
        if twice:
            raise TraceError(f"trace {self.name!r}: column {twice[0]} appears twice", hint="remove one of them")

    def _add(self, number: int, line: dict[str | None, Any]) -> None:
        beyond = line.pop(None, ())
        if any(beyond):
            raise TraceError(
                f"trace {self.name!r}, row {number}: it has more cells than the header",
                hint="put text with commas in double quotes",
            )
        if any(line.values()):
            self.lines.append(cast("dict[str, str]", line))
            self.numbers.append(number)

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, column: str) -> list[str]:
        """The column as text."""
        return [(line.get(column) or "").strip() for line in self.lines]

    def floats(self, column: str, empty: float | None = None) -> list[float]:
        """The column as numbers; empty cells are an error unless a value for them is given."""
        return [self.number(i, column, text, empty) for i, text in enumerate(self.text(column))]

    def ints(self, column: str, empty: int | None = None) -> list[int]:
        """The column as whole numbers."""
        values = self.floats(column, empty)
        for i, value in enumerate(values):
            if value != int(value) or abs(value) > 2**53:
                raise self.error(i, f"{column} is {value:g}", "it must be a whole number")
        return [int(value) for value in values]

    def error(self, index: int, what: str, hint: str) -> TraceError:
        """An error that names the row."""
        return TraceError(f"trace {self.name!r}, row {self.numbers[index]}: {what}", hint=hint)

    def number(self, index: int, column: str, text: str, empty: float | None = None) -> float:
        """One cell's text as a finite number."""
        if not text and empty is not None:
            return empty
        try:
            value = float(text)
        except ValueError:
            raise self.error(index, f"{column} is {text!r}", "it must be a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise self.error(index, f"{column} is {text!r}", "it must be a finite number")
        return value
