"""What every benchmark ends with: one line of JSON, always with the same fields.

Where the speed of code is measured `ratio` is how many times as fast as the peer we are; where schedules are
compared it is ours / peer. The goal says what it must be.
"""

from __future__ import annotations

import json


def report(
    name: str,
    *,
    ours: float | None,
    peer: float | None,
    ratio: float | None,
    unit: str,
    goal: str,
    ok: bool | None,
    **more: object,
) -> None:
    """Print the line. `ok` is about the goal alone: False where a figure is missing, None where there is no peer or no
    goal."""
    line = {"name": name, "ours": ours, "peer": peer, "ratio": ratio, "unit": unit, "goal": goal, "ok": ok, **more}
    print(json.dumps(line), flush=True)
