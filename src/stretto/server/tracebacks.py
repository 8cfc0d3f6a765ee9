"""Why a program failed, as its own log tells it. The log may be anything by now: see `jobfiles`."""

from __future__ import annotations

import re
from pathlib import Path

from stretto import jobfiles

_LOOK_AT_BYTES = 65536


def last_traceback(log: Path, root: Path | None = None) -> str:
    """The traceback at the end of a log; empty if there is none."""
    found = re.search(r"^Traceback \(most recent call last\):$.*", _end(log, root), re.MULTILINE | re.DOTALL)
    return found.group().strip() if found else ""


def last_line(log: Path, root: Path | None = None) -> str:
    lines = _end(log, root).splitlines()
    return lines[-1] if lines else ""


def last_alert(log: Path, root: Path | None = None, lines: int = 30) -> str:
    """Why haproxy did not start."""
    told = _end(log, root).splitlines()[-lines:]
    alerts = [line.partition(" : ")[2] for line in told if line.startswith("[ALERT]")]
    said = [text for text in alerts if "no server available" not in text and not text.endswith("Exiting.")]
    return said[-1] if said else ""


def _end(log: Path, root: Path | None) -> str:
    try:
        return jobfiles.read_end(log, _LOOK_AT_BYTES, root=root).decode(errors="replace")
    except OSError:
        return ""
