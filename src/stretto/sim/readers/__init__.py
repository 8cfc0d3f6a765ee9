"""Trace formats, a file each. This table is the one list of names; modules load on first use.

A reader module has `read(path, options) -> Trace` and `Options`, the struct of what `--set` may say to it.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import TraceError, UsageError, unknown
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
    if not path.is_file():
        raise UsageError(f"trace file {str(path)!r} does not exist", hint="give the path of a readable file")
    try:
        options = msgspec.convert(dict(settings or {}), reader.Options, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"format {format}: {error}", hint=f"options and defaults: {reader.Options()}") from None
    trace: Trace = reader.read(path, options)
    return trace


class Rows:
    """A CSV file with a header, read as text; cells are converted on demand, errors name row and column."""

    def __init__(self, path: Path, required: Sequence[str]) -> None:
        self.name = path.name
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                header = [name.strip() for name in reader.fieldnames or ()]
                reader.fieldnames = header
                self.header = header
                missing = [column for column in required if column not in header]
                if missing:
                    raise TraceError(
                        f"trace {self.name!r}: column {', '.join(missing)} is missing",
                        hint=f"the file has: {', '.join(header) or 'no header'}",
                    )
                self.lines = [line for line in reader if any(line.values())]
        except (UnicodeDecodeError, csv.Error) as error:
            raise TraceError(f"trace {self.name!r} is not a CSV text file: {error}", hint="check the file") from None
        self.numbers = list(range(2, len(self.lines) + 2))

    def __len__(self) -> int:
        return len(self.lines)

    def text(self, column: str) -> list[str]:
        """The column as text."""
        return [(line.get(column) or "").strip() for line in self.lines]

    def floats(self, column: str, empty: float | None = None) -> list[float]:
        """The column as numbers; empty cells are an error unless a value for them is given."""
        return [self._number(i, column, text, empty) for i, text in enumerate(self.text(column))]

    def ints(self, column: str, empty: int | None = None) -> list[int]:
        """The column as whole numbers."""
        values = self.floats(column, empty)
        for i, value in enumerate(values):
            if value != int(value):
                raise self.error(i, f"{column} is {value}", "it must be a whole number")
        return [int(value) for value in values]

    def error(self, index: int, what: str, hint: str) -> TraceError:
        """An error that names the row."""
        return TraceError(f"trace {self.name!r}, row {self.numbers[index]}: {what}", hint=hint)

    def _number(self, index: int, column: str, text: str, empty: float | None) -> float:
        if not text and empty is not None:
            return empty
        try:
            value = float(text)
        except ValueError:
            raise self.error(index, f"{column} is {text!r}", "it must be a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise self.error(index, f"{column} is {text!r}", "it must be a finite number")
        return value
