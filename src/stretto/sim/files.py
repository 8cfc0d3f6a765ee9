"""Files that somebody names: one clear error for what cannot be read, whatever the reason is."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from stretto.errors import TraceError, UsageError


def check(path: Path, what: str, hint: str) -> None:
    """Raise unless this is a file that can be opened. `what` it is to be: `trace file`, `record` …"""
    if path == Path():
        raise UsageError(f"no {what} is given", hint=hint)
    try:
        if path.is_dir():
            raise UsageError(f"{what} {str(path)!r} is a folder", hint=hint)
        if not path.exists():
            raise UsageError(f"{what} {str(path)!r} does not exist", hint=hint)
        if not path.is_file():
            raise UsageError(f"{what} {str(path)!r} is not an ordinary file", hint=hint)
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise cannot_be_read(path, what, error, hint) from None


def cannot_be_read(path: Path, what: str, error: Exception, hint: str) -> UsageError:
    why = getattr(error, "strerror", None) or str(error)
    return UsageError(f"{what} {str(path)!r} cannot be read: {why}", hint=hint)


def lines(path: Path, what: str, hint: str) -> Iterator[str]:
    """Of a text, which may have been compressed (`.gz`)."""
    check(path, what, hint)
    try:
        with _opened(path) as file:
            yield from file
    except UnicodeDecodeError as error:
        raise TraceError(f"{what} {path.name!r} is not text: {error.reason}", hint=hint) from None
    except (EOFError, zlib.error, OSError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TraceError(f"{what} {path.name!r} cannot be read to its end: {why}", hint="the file is damaged") from None


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
