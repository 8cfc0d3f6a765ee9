"""Why a script failed, as its own log tells it."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_LOOK_AT_BYTES = 65536


def last_traceback(log: Path) -> str:
    """The traceback at the end of a log; empty if there is none."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOOK_AT_BYTES))
        text = file.read().decode(errors="replace")
        found = re.search(r"^Traceback \(most recent call last\):$.*", text, re.MULTILINE | re.DOTALL)
        return found.group().strip() if found else ""
    return ""
