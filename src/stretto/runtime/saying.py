"""Words of ours in a worker's log. Nobody dies of a log that cannot be written."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"stretto: {text}", file=sys.stderr, flush=True)
